"""Statements for generated classes, as templates.

Capitals are filled in: ``E4`` an expression of width 4, ``V4`` a local name that exists, ``N4a`` a
new one that later code may read, ``T4a`` a new one that it may not, ``L46`` a layer from width 4 to
6, ``A`` an activation, ``C`` a condition.

No activation in place follows a tensor's hook: on a CPU torch loses that hook where ``F.linear``
returned a view, which ours does not.
"""

# torch.jit.script takes these, too.
SIMPLE = """
N4a = E4
---
N6a = E6
---
T6a = L46(E4)
N6b = A(T6a)
---
N6a = L46(E4)
N6b = A(N6a)
---
N4a = L44(E4)
N4a = A(N4a)
---
N4a = L44(E4)
N4b = A(N4a) + N4a
---
N4a = L44(E4)
N4b = N4a
N4c = A(N4a)
N4d = N4b
---
N4a = E4
N4b = L44(N4a)
N4a = E4
N4c = A(N4b)
---
if C:
    N4a = A(L44(E4))
else:
    N4a = L44(E4)
---
N6a = L46(E4)
if C:
    N6a = A(N6a)
---
N6a = L46(E4)
N6b = A(N6a) if C else N6a
---
N4a = E4
for T4l in self.layers:
    N4a = A(T4l(N4a))
---
N4a = E4
for T4i, T4l in enumerate(self.layers):
    N4a = A(T4l(N4a)) if T4i < len(self.layers) - 1 else T4l(N4a)
---
N4a = E4
for T4l in self.layers:
    N4a = T4l(N4a)
    N4a = A(N4a)
---
N4a = E4
N4p = torch.zeros_like(N4a)
for T4l in self.layers:
    T4q = N4p
    N4p = T4l(N4a)
    N4a = A(N4p) + T4q
---
N4a = self.act(self.drop(L44(E4)))
---
N4a = L44(E4)
N4a = self.drop(N4a)
N4a = A(N4a)
---
N4a = F.relu(L44(E4), inplace=True)
---
N4a = L44(E4)
N4b = N4a.relu_()
N4c = N4a * 0.5
---
N4a = L44(E4)
N4b = self.inplace(N4a)
N4c = N4a - 1
---
N4a = self.seq(E4)
N6b = self.seq[0](V4)
---
N4a = A(L44(E4) + V4)
---
N4a = L44(E4)
N4a += V4
N4b = A(N4a)
---
N4a = A(self.conv((E4).reshape(1, 1, -1, 4))).reshape(x.shape)
---
N4a = self.stem((E4).reshape(1, 1, -1, 4)).reshape(x.shape)
---
N4a = self.helper(E4)
---
N6a = A(L46(V4)) * L46(V4)
---
T4a = E4
N4b = L64(L46(T4a) * A(self.wide(T4a)))
---
T4a = E4
T6g = A(self.wide(T4a))
T6u = L46(T4a)
N4b = L64(self.drop(T6g * T6u))
---
T4a = E4
T6g = self.wide(T4a)
T4a = L46(T4a)
T4a = A(T6g) * T4a
N4b = L64(T4a)
---
T6g, T6u = self.both(E4).chunk(2, dim=-1)
N4b = L64(A(T6u) * T6g)
---
N6a = self.both(E4)
N6b, N6a = N6a.chunk(2, -1)
N6a = N6a * A(N6b)
N4b = self.drop(L64(N6a))
"""

WILD = """
N4b = A(N4a := L44(E4))
---
N4a, N4b = L44(E4), A(E4)
---
N4a = N4b = A(L44(E4))
---
N4a = (E4) * 1
T4b = L44(N4a)
N4a.mul_(0.5)
N4c = A(T4b)
---
N4a = (E4) * 1
T4b = self.fc3(N4a)
N4a += V4
N4c = F.relu(T4b)
---
T6a = L46(E4)
N6b = A(T6a)
del T6a
---
N4a = N4b = E4
for T4l in self.layers:
    N4b = T4l(N4a)
    N4a = A(N4b)
---
N4a = E4
T4i = 0
while T4i < len(self.layers):
    N4a = A(self.layers[T4i](N4a))
    T4i += 1
---
N4a = E4
for T4l in self.layers:
    T4p = T4l(N4a)
    if C:
        continue
    N4a = A(T4p)
---
N4a = E4
for T4l, T4g in zip(self.layers, self.acts):
    N4a = T4g(T4l(N4a))
---
N4a = N4b = E4
try:
    N4a = L44(N4b)
    N4b = A(N4a)
    if C:
        raise KeyError
except KeyError:
    N4b = N4a
---
N4a = L44(E4)
with torch.no_grad():
    N4b = A(N4a)
---
with torch.set_grad_enabled(C):
    T4a = L44(E4)
    N4b = A(T4a)
---
def T4f(t):
    return A(L44(t))
N4a = T4f(E4)
---
T4f = lambda t: A(L44(t))
N4a = T4f(E4)
---
N4p = V4
def T4f(t):
    nonlocal N4p
    N4p = L44(t)
    return A(N4p)
N4a = T4f(E4)
---
N4a = L44(E4)
T4f = lambda: N4a
N4b = A(N4a) + T4f()
---
T4a = L44(E4)
N4b = A(T4a)
N4c = locals()["T4a"]
---
N4a = L44(E4)
F.relu(N4a, inplace=True)
---
N4a = E4
for T4l in self.seq:
    N4a = T4l(N4a)
---
T6a = self.seq[:1](E4)
N4a = self.seq[1:](T6a) + T6a.sum()
---
N4a = E4
for T4l in self.seq._modules.values():
    N4a = T4l(N4a)
---
N6a = A(self.seq[:1](E4))
---
N4a = checkpoint(lambda t: A(L44(t)), E4, use_reentrant=False)
---
N4a = L44(E4)
N4b = A(N4a.detach())
---
N4a = L44(E4)
if N4a.requires_grad:
    N4a.register_hook(lambda g: g * 2)
N4b = F.gelu(N4a)
---
N4a = KINDS[self.kind](L44(E4))
---
N4a = self.branch.act(self.branch.fc(E4))
---
N4a = self.fn(L44(E4))
---
N4a = A(L44((x := E4)))
---
N4a = L44(E4)
N4b = [A(N4a), N4a][0]
N4c = {"k": N4a}["k"]
---
N4a = (F.relu if C else torch.tanh)(L44(E4))
---
N4a = (L44 if C else L44)(E4).relu()
---
N4a = sum(T4g(T4l(V4)) * L44(V4) for T4l, T4g in zip(self.layers, self.acts))
---
T4a = (E4) * 1
T6g = self.wide(T4a)
T4a.mul_(0.5)
N4b = L64(A(T6g) * self.fc1(T4a))
---
T4a = E4
T6g = self.wide(T4a)
T4a = V4
T6u = L46(T4a)
N4b = L64(A(T6g) * T6u)
---
T4a = E4
T6u = self.fc1(T4a)
T4a = 1 - T4a
T6g = self.wide(T4a)
N4b = L64(T6u * F.gelu(T6g))
---
T4a = (E4) * 1
T6g = A(self.wide(T4a))
N6u = L46(T4a)
N4b = L64(T6g * N6u) + T6g.sum()
---
T4a = E4
T6g, T6u = torch.chunk(self.both(T4a), 2, dim=x.dim() - 1)
N6b = T6g * A(T6u) if C else A(T6g) * T6u
---
T4a = E4
T6g, T6u = self.both(T4a).chunk(2, dim=self.axis)
N4b = L64(T6g * A(T6u) if C else A(T6g) * T6u)
---
T4a = E4
T6g = F.gelu(self.wide(T4a), approximate="tanh")
N4b = A(L64(T6g * L46(T4a)))
---
match self.kind:
    case "relu":
        N4a = A(L44(E4))
    case _:
        N4a = L44(E4)
        N4a = A(N4a)
---
N4a = L44(E4)
if self.asked:
    N4a = A(N4a)
elif C:
    N4a = N4a + 1
else:
    N4a = N4a - V4
---
N4a = L44(self.changing(E4))
if self.times % 3:
    N4a = A(N4a)
---
if (T4a := L44(E4)).shape[-1] == 4:
    N4a = A(T4a)
else:
    N4a = T4a
---
N4a = L44(E4)
try:
    N4a = A(N4a)
finally:
    N4a = N4a * 2
"""

# For classes that are given other modules.
PARTS = """
N4a = self.parts[0](E4)
---
N4a = E4
N4a = N4a + self.parts[-1](N4a)
---
N4a = sum(T4p(V4) for T4p in self.parts)
---
N4a = E4
for T4p in self.parts:
    T4q = T4p[0](N4a).sum() if isinstance(T4p, nn.Sequential) else 0
    N4a = T4p(N4a) + T4q
"""
SIMPLE, WILD, PARTS = ([t.strip() for t in text.split("---\n")] for text in (SIMPLE, WILD, PARTS))
