"""The three libraries, what each is made of, and where it is put.

    lib/libfused_kernels.so     what needs nvcc and CUDA's libraries, and nothing of torch: once
    lib/torch2.11/_C.abi3.so    the operators, for one release of torch each, C++ alone
    lib/torch2.11/_direct*.so   the way to them for one release of torch and one of Python

Beside each lies a file that says what it was built of and for. It is written last, so that it
stands for a finished build.
"""

import itertools
import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path

import compiling
import precompiled
from compiling import CSRC, ROOT, Unit
from toolkits import Toolkit, gencode
from torchs import Torch

HEADERS = ("fused_linear.h", "fused_activation.h")  # that are installed
# Folders of csrc; what needs CUDA lies in a folder `cuda`, and csrc/python is a library of its own.
ROOMS = (".", "core", "reference", "gemm", "plans", "dispatch", "cpu", "autograd", "float8", "conv")
CUDA_ROOMS = (
    *("cuda", "cuda/float8", "cuda/hopper", "cuda/kernels", "cuda/runtime", "cuda/tune"),
    *("cuda/small", "cuda/small/kernels", "conv/cuda"),
)
# The kernels' library, without torch, is made of these.
KERNELS = (
    *("cuda/kernels/*.*", "cuda/tune/*.cu", "cuda/float8/*.cu", "cuda/hopper/*.cpp"),
    *("cuda/small/kernels/*.*", "conv/cuda/*.cu"),
    *("cuda/runtime/cublaslt.cpp", "cuda/float8/lt_product.cpp"),
)
HOPPER = CSRC / "cuda" / "hopper"
# How often hopper/kernels.cu is compiled.
KINDS = ("forward", "narrow_forward", "saving_forward", "backward", "gating", "glu")
HOPPER_UNITS = list(itertools.product(KINDS, ("bf16", "f16"), ("false", "true")))
# They need instructions that only this target has. 2908 is about CUTLASS's own lambdas. Without
# NDEBUG the tensor cores wait after each instruction.
HOPPER_FLAGS = ["-gencode=arch=compute_90a,code=sm_90a", "-diag-suppress=2908", "-O3", "-DNDEBUG"]
# Seconds that a file takes: of the host's kernels, of others, of several in one, of Hopper's.
QUICK, SLOW, JOINED, HOPPER_SECONDS = 12, 16, 20, 100


@dataclass
class Part:
    """A library to be made.

    Attributes:
        made: its place below the package's folder `lib`.
        about: what is said of it in the file beside it.
        sources: what it is made of.
        how: gives what is compiled, and the linker's flags, in which {lib} is the folder `lib`. It
            asks the compilers, which need not be there where nothing has changed.
    """

    made: str
    about: dict
    sources: list[Path]
    how: Callable[[], tuple[list[Unit], list[str]]]

    @property
    def record(self):
        folder, _, name = self.made.rpartition("/")
        return Path(folder, f"{name.partition('.')[0].removeprefix('lib')}.json")

    @cached_property
    def fingerprint(self):
        """Content, not times: the tree and the library in it are copied between machines."""
        config = {key: value for key, value in self.about.items() if not key.startswith("why")}
        paths = sorted(set().union(*map(compiling.included, self.sources)))
        tools = [*Path(__file__).parent.glob("*.py"), ROOT / "setup.py"]
        texts = [f"{p.relative_to(ROOT)}\n{p.read_text()}" for p in [*paths, *sorted(tools)]]
        return compiling.digest(json.dumps([config, self.made], sort_keys=True), *texts)

    def is_current(self, lib):
        now, record = self.fingerprint, lib / self.record
        if not (lib / self.made).exists() or not record.exists():
            return False
        return json.loads(record.read_text()).get("fingerprint") == now

    @cached_property
    def units_and_flags(self):
        return self.how()

    def link(self, lib):
        record = lib / self.record
        record.unlink(missing_ok=True)
        units, flags = self.units_and_flags
        objects = [unit.made for unit in units if unit.made.suffix == ".o"]
        flags = [flag.replace("{lib}", str(lib)) for flag in flags]
        compiling.link(objects, lib / self.made, flags)
        about = {**self.about, "fingerprint": self.fingerprint}
        record.with_suffix(".tmp").write_text(json.dumps(about, indent=2) + "\n")
        os.replace(record.with_suffix(".tmp"), record)


# --- flags ----------------------------------------------------------------------------------------


def as_system(folders):
    """As system headers, so that the warnings we read are about our own code."""
    return [flag for folder in folders for flag in ("-isystem", str(folder))]


def cxx_runtime():
    """The shared C++ runtime, by its path.

    Where a compiler finds only the static one it would put a second copy beside torch's, and the
    first stream that prints an error would crash.
    """
    ask = [*compiling.cxx().split(), "-print-file-name=libstdc++.so.6"]
    path = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    return [path] if os.path.isabs(path) else []


def every_compiler(debug):
    return ["-std=c++20", *(["-O0", "-UNDEBUG"] if debug else ["-O3", "-DNDEBUG"])]


def cxx_command(torch: Torch, debug):
    # Calls without a table in between: a training step of 110 µs takes 3 less.
    direct_calls = ["-fno-semantic-interposition", "-fno-plt"]
    command = [*compiling.cxx().split(), "-c", "-fPIC", *direct_calls, *every_compiler(debug)]
    command += ["-Wall", "-Wextra", "-Werror=switch", "-g" if debug else "-g0"]
    return [*command, *torch.openmp, f"-I{CSRC}"]


def nvcc(toolkit):
    return (os.environ.get("PYTORCH_NVCC") or str(toolkit.home / "bin" / "nvcc")).split()


def sources(*patterns):
    return sorted(p for pattern in patterns for p in CSRC.glob(pattern))


def units(paths, command, build, seconds, after=None):
    made = lambda p: build / p.relative_to(CSRC).with_suffix(".o")  # noqa: E731
    return [Unit(p, made(p), tuple(command), seconds, after) for p in paths]


def joined(paths, command, build, after=None):
    """A unit for each folder, as torch's headers take longer than most files; nodes, which name
    their parts alike, stay alone."""
    nodes = [path for path in paths if path.stem.endswith("_node")]
    others = [path.relative_to(CSRC) for path in paths if path not in nodes]
    made = units(nodes, command, build, QUICK, after)
    folder_of_file = attrgetter("parent")
    for folder, names in itertools.groupby(sorted(others, key=folder_of_file), folder_of_file):
        source = build / "joined" / f"{'_'.join(folder.parts) or 'top'}.cpp"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("".join(f'#include "{name.as_posix()}"\n' for name in names))
        made.append(Unit(source, source.with_suffix(".o"), tuple(command), JOINED, after))
    return made


# --- the parts --------------------------------------------------------------------------------


def kernels(toolkit: Toolkit, debug, why):
    """libfused_kernels.so."""
    with_hopper = toolkit.cutlass is not None
    other = HOPPER / ("absent.cpp" if with_hopper else "hopper.cpp")
    paths = [p for p in sources(*KERNELS) if p.suffix in (".cpp", ".cu") and p != other]

    def how():
        name = re.sub(r"\W+", "-", f"{toolkit.version}-{toolkit.arch_list}{'-debug' * debug}")
        build = ROOT / "build" / f"kernels-{name}"
        every = [*every_compiler(debug), f"-I{CSRC}", *as_system(toolkit.includes)]
        host = ["-Xcompiler", "-fPIC,-Wall,-Werror=switch", "--expt-relaxed-constexpr"]
        cuda = [*nvcc(toolkit), "-c", *every, *host]
        cxx = [*compiling.cxx().split(), "-c", "-fPIC", *every, "-Wall", "-Wextra"]
        targets = gencode(toolkit.arch_list)
        made = units([p for p in paths if p.suffix == ".cpp"], cxx, build, QUICK)
        device = [p for p in paths if p.suffix == ".cu"]
        made += units(device, [*cuda, *targets], build, SLOW * len(targets))
        for kind, type_, transposed in HOPPER_UNITS * with_hopper:
            unit = [*cuda, *HOPPER_FLAGS, f"-DFUSED_KIND={kind}", f"-DFUSED_TYPE={type_}"]
            unit += [f"-DFUSED_TRANSPOSED={transposed}", *as_system([toolkit.cutlass])]
            path = build / f"hopper/{kind}_{type_}{'_transposed' * (transposed == 'true')}.o"
            made.append(Unit(HOPPER / "kernels.cu", path, tuple(unit), HOPPER_SECONDS))
        libraries = [toolkit.library("cudart"), toolkit.library("cublasLt")]
        return made, ["-Wl,--no-undefined", "-Wl,--as-needed", *libraries, *cxx_runtime()]

    about = {"cuda": toolkit.version, "arch_list": toolkit.arch_list, "debug": debug}
    about |= {"hopper": with_hopper, "why": why}
    return Part("libfused_kernels.so", about, [*paths, HOPPER / "kernels.cu"], how)


def folder_of(torch: Torch):
    return f"torch{torch.minor}"


def build_folder(torch: Torch, toolkit, debug):
    """The folder of the files compiled for one torch."""
    kind = toolkit.version if toolkit else "cpu"
    return ROOT / "build" / f"torch-{torch.version}-{kind}{'-debug' * debug}"


def headers_of(torch: Torch, toolkit):
    return as_system([*torch.includes, *(toolkit.includes if toolkit else ())])


def operators(torch: Torch, toolkit, debug, why, jobs):
    """_C.abi3.so, which knows nothing of Python."""
    rooms = [*ROOMS, *(CUDA_ROOMS if toolkit else ())]
    paths = [p for p in sources(*(f"{room}/*.cpp" for room in rooms)) if p not in sources(*KERNELS)]

    def how():
        build = build_folder(torch, toolkit, debug)
        command = [*cxx_command(torch, debug), *headers_of(torch, toolkit)]
        header = precompiled.unit(command, build, toolkit is not None, jobs)
        if header is None:
            made = units(paths, command, build, SLOW)
        else:
            command += ["-include", str(header.made.with_suffix(""))]
            made = [header, *joined(paths, command, build, header)]
        names = ["c10", "torch_cpu", "torch", *["c10_cuda", "torch_cuda"] * (toolkit is not None)]
        flags = [*torch.libraries(names), *cxx_runtime(), *torch.openmp]
        if toolkit:
            flags += ["-L{lib}", "-lfused_kernels", toolkit.library("cudart")]
            # Above it, or beside it where somebody has copied the two.
            flags += ["-Wl,-rpath,$ORIGIN/..:$ORIGIN"]
        return made, flags

    about = {"torch": torch.version, "cuda": toolkit and toolkit.version, "debug": debug}
    about |= {"headers": torch.headers, "why": why}
    return Part(f"{folder_of(torch)}/_C.abi3.so", about, paths, how)


def direct(torch: Torch, toolkit, debug):
    """Python's own way to the operators; none where there is no Python.h: torch.ops is another."""
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        return None
    paths = sources("python/*.cpp")

    def how():
        command = [*cxx_command(torch, debug), *headers_of(torch, None), *as_system([include])]
        build = build_folder(torch, toolkit, debug) / sysconfig.get_config_var("SOABI")
        names = ["c10", "torch_cpu", "torch", "torch_python"]
        return joined(paths, command, build), [*torch.libraries(names), *cxx_runtime()]

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return Part(f"{folder_of(torch)}/_direct{suffix}", {"torch": torch.version}, paths, how)
