"""Faults that the tests must notice, one a mechanism: for tests/support/mutants.py."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """What is wrong, where, the text that is replaced, what by, and whose tests must notice it."""

    name: str
    file: str
    find: str
    put: str
    tests: str


MUTANTS = (
    # --- what is computed ---
    Mutant(
        "the wrong GELU in inference",
        "csrc/autograd/linear_node.cpp",
        "return linear_gelu(input, weight, bias, approximate);",
        'return linear_gelu(input, weight, bias, "tanh");',
        "tests/ops",
    ),
    Mutant(
        "ReLU's bits in another order",
        "csrc/cpu/relu_mask.cpp",
        "byte |= unsigned{passing[8 * i + j]} << j;",
        "byte |= unsigned{passing[8 * i + j]} << (7 - j);",
        "tests/ops tests/memory",
    ),
    Mutant(
        "NaN lost in ReLU's bits",
        "csrc/cpu/relu_mask.cpp",
        "return !(output <= 0);",
        "return output > 0;",
        "tests/ops tests/memory",
    ),
    Mutant(
        "a bias summed once for each block",
        "csrc/cpu/gated.cpp",
        "at::sum_out(sum, as_rows(values).narrow(0, first, count), 0,",
        "at::sum_out(sum, as_rows(values), 0,",
        "tests/ops tests/autograd tests/cpu",
    ),
    Mutant(
        "gate's bias gradient for up's",
        "csrc/autograd/gated_backward.cpp",
        "if (state.wanted[gate_bias_edge]) result[gate_bias_edge] = first;\n"
        "  if (state.wanted[up_bias_edge]) result[up_bias_edge] = second;",
        "if (state.wanted[gate_bias_edge]) result[gate_bias_edge] = second;\n"
        "  if (state.wanted[up_bias_edge]) result[up_bias_edge] = first;",
        "tests/autograd",
    ),
    Mutant(
        "a gradient in another layout than torch's",
        "csrc/reference/linear.cpp",
        "return {by_columns ? grad_input : grad_input.contiguous(), grad_weight, grad_bias};",
        "return {grad_input.contiguous(), grad_weight, grad_bias};",
        "tests/ops",
    ),
    Mutant(
        "strides that only Meta gives",
        "csrc/dispatch/meta.cpp",
        "return {S::grad_layer_input(layer.input, layer.wanted[0]),",
        "return {S::grad_input(layer.input, layer.wanted[0]),",
        "tests/ops",
    ),
    Mutant(
        "channels-last that only Meta gives",
        "csrc/reference/conv.cpp",
        "convolution(image, weight, bias, geometry).contiguous(conv::format_of(image, weight));",
        "convolution(image, weight, bias, geometry).contiguous();",
        "tests/ops",
    ),
    # --- which way a call goes ---
    Mutant(
        "the plain way without a word",
        "csrc/reference/linear.cpp",
        "  const explain::Row row(op, input, weight);\n  explain::append(objection);",
        "  explain::append(objection);",
        "tests/ops",
    ),
    Mutant(
        "a step that autocast casts again",
        "csrc/dispatch/autocast.cpp",
        "    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);\n"
        "    return step(args...);",
        "    return step(args...);",
        "tests/ops",
    ),
    Mutant(
        "a bias that autocast leaves as it is",
        "csrc/dispatch/autocast.cpp",
        "return has_value(tensor) ? OptionalTensor(cast(*tensor)) : std::nullopt;",
        "return tensor;",
        "tests/ops",
    ),
    Mutant(
        "a subclass that is not asked",
        "csrc/dispatch/subclasses.cpp",
        "if (const auto result = if_foreign(args...)) return *result;",
        "",
        "tests/ops",
    ),
    Mutant(
        "a mode of torch's functions that is passed by",
        "csrc/python/direct.cpp",
        "count == sizeof...(Args) && !at::impl::torch_function_mode_enabled() &&",
        "count == sizeof...(Args) &&",
        "tests/ops",
    ),
    Mutant(
        "vmap over another dimension",
        "csrc/reference/gated.cpp",
        "return has_value(up) ? std::pair(gate, *up) : gated::halves(gate);",
        "return has_value(up) ? std::pair(gate, *up)\n"
        "                       : std::pair(gate.chunk(2, 1)[0], gate.chunk(2, 1)[1]);",
        "tests/autograd tests/ops",
    ),
    Mutant(
        "an inner block that switches off the outer one",
        "torch_fused_linear/_switch.py",
        "self._put(self._entered.pop())",
        "self._put(self._entered.pop() if len(self._entered) == 1 else self._made)",
        "tests/ops",
    ),
    Mutant(
        "halves joined although autograd follows them",
        "csrc/dispatch/gated.cpp",
        "const bool may_join = !is_followed(layer.gate) && !is_followed(layer.up);",
        "const bool may_join = true;",
        "tests/autograd",
    ),
    # --- hand-over ---
    Mutant(
        "a hook on the tensor missed",
        "csrc/autograd/handover.cpp",
        'if (!producer.tensor_pre_hooks().empty()) return "a hook on the tensor";',
        "",
        "tests/handover",
    ),
    Mutant(
        "another consumer missed",
        "csrc/autograd/handover.cpp",
        "return own != 1 || all != (counted ? 1 : 0);",
        "return own != 1;",
        "tests/handover",
    ),
    Mutant(
        "a note lost",
        "csrc/autograd/linear_node.cpp",
        "receiver->leave({grad_input, {wants_bias ? receivers_bias : Tensor()}, receiver->saved});",
        "",
        "tests/handover",
    ),
    Mutant(
        "a note that outlives its run",
        "csrc/autograd/handover.cpp",
        "if (const auto node = node_.lock()) static_cast<Producer&>(*node).take(graph_task_);",
        "",
        "tests/handover tests/csrc",
    ),
    Mutant(
        "a bias gradient without what was added on the way",
        "csrc/autograd/linear_node.cpp",
        "return {handover::with_rest(note->passed, rest), Activation::none, {}};",
        "return {handover::with_rest(note->passed, rest), Activation::none, note->gradients[0]};",
        "tests/handover",
    ),
    Mutant(
        "saved tensors written to after they were lent",
        "csrc/autograd/handover.cpp",
        "bool Note::is_unchanged() const { return "
        "std::ranges::equal(saved, versions_, {}, version_of); }",
        "bool Note::is_unchanged() const { return true; }",
        "tests/handover",
    ),
    # --- what is kept ---
    Mutant(
        "saved tensors' hooks that see another tensor",
        "csrc/autograd/recompute.cpp",
        "bool are_kept_as_they_are() { return !at::SavedTensorDefaultHooks::get_hooks(); }",
        "bool are_kept_as_they_are() { return true; }",
        "tests/memory",
    ),
    Mutant(
        "a recomputed output that was written to since",
        "csrc/autograd/recompute.cpp",
        "input.output_nr() == 0 &&\n      input._version() == 0) {",
        "input.output_nr() == 0) {",
        "tests/memory",
    ),
    Mutant(
        "a weight kept that nobody reads",
        "csrc/autograd/linear_node.cpp",
        "if (input.requires_grad()) {\n    kept_[weight_index]",
        "if (true) {\n    kept_[weight_index]",
        "tests/memory tests/autograd",
    ),
    Mutant(
        "an output kept twice",
        "csrc/autograd/mlp_node.cpp",
        "output_kept ? Memory::standard : memory);",
        "memory);",
        "tests/memory tests/autograd",
    ),
    Mutant(
        "a gradient computed that nobody wants",
        "csrc/autograd/mlp_node.cpp",
        "const std::array<bool, 3> mask{goes_below(i), wants_weight(i) && !sum,",
        "const std::array<bool, 3> mask{true, wants_weight(i) && !sum,",
        "tests/autograd",
    ),
    Mutant(
        "a packed weight that has been written to",
        "csrc/cpu/packed_weights.cpp",
        "return version_ == weight._version() &&\n           storage_",
        "return storage_",
        "tests/cpu",
    ),
    Mutant(
        "a packed weight that is trained again",
        "csrc/cpu/packed_weights.cpp",
        "return weight.requires_grad() || accumulator_ != internals::Accumulator(weight);",
        "return weight.requires_grad();",
        "tests/cpu",
    ),
    # --- derivatives of derivatives, and graphs of the backward ---
    Mutant(
        "double backward cut at the pre-activation",
        "csrc/autograd/double_backward.cpp",
        "if (!linked || !at::GradMode::is_enabled()) return result;",
        "return result;",
        "tests/autograd",
    ),
    Mutant(
        "double backward cut at a convolution's output",
        "csrc/autograd/conv_node.cpp",
        "kept_[State::output] = SavedVariable(output, /*is_output=*/true);",
        "kept_[State::output] = SavedVariable(output.detach(), /*is_output=*/false);",
        "tests/autograd tests/ops tests/nn tests/integration",
    ),
    Mutant(
        "double backward cut below a part of a chain",
        "csrc/autograd/mlp_node.cpp",
        "if (!has_gradient || !node_ || !at::GradMode::is_enabled()) return input;",
        "return input;",
        "tests/autograd",
    ),
    Mutant(
        "padding for dilation in compiled autograd",
        "csrc/autograd/conv_node.cpp",
        "{{all.slice(0, 2), all.slice(2, 2), all.slice(4, 2), all[6]},",
        "{{all.slice(0, 2), all.slice(4, 2), all.slice(2, 2), all[6]},",
        "tests/autograd tests/integration tests/graph",
    ),
    # --- plans ---
    Mutant(
        "plans of TF32 for those of fp32",
        "csrc/plans/decisions.cpp",
        "visit(g.to_f32), visit(g.adds), visit(g.math);",
        "visit(g.to_f32), visit(g.adds);",
        "tests/csrc",
    ),
    Mutant(
        "a product's stride that is not in its key",
        "csrc/gemm/problem.h",
        "  problem.ldb = left.ld;\n",
        "",
        "tests/csrc",
    ),
    Mutant(
        "plans of an old budget",
        "csrc/plans/registry.cpp",
        "if (budget_setting().exchange(milliseconds) != milliseconds) start_generation();",
        "budget_setting().exchange(milliseconds);",
        "tests/csrc",
    ),
    # --- the pass of torch.compile ---
    Mutant(
        "a pass that swallows an output",
        "torch_fused_linear/graph/matching.py",
        "return next(iter(node.users)) if len(node.users) == 1 else None",
        "return next(iter(node.users), None)",
        "tests/graph",
    ),
    Mutant(
        "a pass that takes one GELU for the other",
        "torch_fused_linear/graph/matching.py",
        'name = name_of_gelu(args.get("approximate", "none"))',
        'name = name_of_gelu("tanh")',
        "tests/graph",
    ),
    Mutant(
        "a pass that moves a read over a write",
        "torch_fused_linear/graph/fusion_pass.py",
        "return not written and self.in_one_mode(nodes)",
        "return self.in_one_mode(nodes)",
        "tests/graph",
    ),
    Mutant(
        "a pass that moves a layer out of its mode",
        "torch_fused_linear/graph/fusion_pass.py",
        "return not any(min(places) < i < max(places) for i in self.switches)",
        "return True",
        "tests/graph",
    ),
    Mutant(
        "a write to out= unseen",
        "torch_fused_linear/graph/effects.py",
        'if arguments.get("inplace") or arguments.get("out") is not None:',
        'if arguments.get("inplace"):',
        "tests/graph",
    ),
    Mutant(
        "a layer beside a collective",
        "torch_fused_linear/graph/collectives.py",
        'if kind(node) == "view" or _collective(node) == "wait_tensor":',
        'if kind(node) == "view":',
        "tests/graph tests/distributed",
    ),
    # --- what speaks of a model ---
    Mutant(
        "a layer's hooks lost when it is taken over",
        "torch_fused_linear/nn/taking_over.py",
        "    *HOOKS,\n",
        "    *HOOKS[:-1],\n",
        "tests/nn",
    ),
    Mutant(
        "a chain's hooks passed by",
        "torch_fused_linear/nn/mlp.py",
        "        or module._forward_pre_hooks\n",
        "",
        "tests/nn",
    ),
    Mutant(
        "a partial sum with the bias on each device",
        "torch_fused_linear/sharding.py",
        '"linear": Rule(_LAYER, {"": ("*o", "i")}, "*oi", added=("bias",)),',
        '"linear": Rule(_LAYER, {"": ("*o", "i")}, "*oi"),',
        "tests/distributed",
    ),
    Mutant(
        "the wrong GELU in ONNX",
        "torch_fused_linear/onnx.py",
        "return self.newer.Gelu(x, approximate=approximate)",
        'return self.newer.Gelu(x, approximate="none")',
        "tests/integration",
    ),
    Mutant(
        "half of a backward's FLOPs",
        "torch_fused_linear/flops.py",
        "return linear(input, weight) * (bool(output_mask[0]) + bool(output_mask[1]))",
        "return linear(input, weight)",
        "tests",
    ),
    # --- fuse_ ---
    Mutant(
        "a function set on an object unseen",
        "torch_fused_linear/fuse/plain.py",
        'if "forward" in own or "_call_impl" in own:',
        'if "forward" in own:',
        "tests/fuse/test_fuse_later.py",
    ),
    Mutant(
        "a dropout in place drawn otherwise",
        "torch_fused_linear/fuse/plain.py",
        " or (inplace and p and training):",
        ":",
        "tests/fuse/test_fuse_later.py",
    ),
    Mutant(
        "a function mode that sees nothing",
        "csrc/python/plain.cpp",
        "return !at::impl::torch_function_mode_enabled();",
        "return true;",
        "tests/fuse/test_fuse_later.py",
    ),
    Mutant(
        "a layer that waits for what changes its input",
        "torch_fused_linear/fuse/runs.py",
        "is_sole = is_sole and scope.may_wait(read, {read: start})",
        "",
        "tests/fuse/test_fuse_programs.py",
    ),
    Mutant(
        "a call before an activation ignored",
        "torch_fused_linear/fuse/syntax.py",
        "            and self._comes_first(node, part)\n",
        "",
        "tests/fuse/test_fuse_programs.py",
    ),
    Mutant(
        "a read in a loop's next turn",
        "torch_fused_linear/fuse/syntax.py",
        "if is_before and not any(p in loops for p in around):",
        "if is_before:",
        "tests/fuse/test_fuse_programs.py",
    ),
    Mutant(
        "a begun call behind an if",
        "torch_fused_linear/fuse/rewrite.py",
        "            node.orelse.insert(0, ast.copy_location(end, node.test))\n",
        "",
        "tests/fuse/test_fuse_programs.py",
    ),
    Mutant(
        "an edited file believed",
        "torch_fused_linear/fuse/source.py",
        " or self.code not in codes.get(self.key, ()):",
        ":",
        "tests/fuse/test_fuse_looks.py",
    ),
    Mutant(
        "code that is never put back",
        "torch_fused_linear/fuse/__init__.py",
        "if not any(MARK in vars(module)",
        "if all(MARK in vars(module)",
        "tests/fuse/test_fuse_looks.py",
    ),
    Mutant(
        "compiled code that is kept",
        "torch_fused_linear/_torch_internals.py",
        "        torch._dynamo.reset_code_caches()\n",
        "        pass\n",
        "tests/fuse/test_fuse.py",
    ),
    Mutant(
        "a filter that is not asked",
        "torch_fused_linear/fuse/plan.py",
        "return None if self._asked.get(value.path, True) else",
        "return None if True else",
        "tests/fuse/test_fuse.py",
    ),
    Mutant(
        "an operator that crosses autocast",
        "torch_fused_linear/fuse/script.py",
        "for value in node.outputs() if depth == 0}",
        "for value in node.outputs()}",
        "tests/fuse/test_fuse_script.py",
    ),
    Mutant(
        "a shared value in TorchScript",
        "torch_fused_linear/fuse/script.py",
        "        if any(len(v.uses()) > 1 for v in (value, last)):",
        "        if False:",
        "tests/fuse/test_fuse_script.py",
    ),
)
