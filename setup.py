"""Builds the two operator libraries; everything else about the package is in pyproject.toml.

swarm_kv/_C.so       csrc/io, csrc/core, csrc/ops and csrc/ops/cpu; always built.
swarm_kv/_C_cuda.so  csrc/ops/cuda and a few files that both need (CUDA_LIBRARY_SHARES); built where
                     nvcc and a CUDA build of torch of the same major version are present.

Both are plain shared libraries that use only LibTorch's stable ABI and no Python C API, so one
wheel serves every Python and every torch from 2.11 on, whichever of them it was built with. Pass
--no-build-isolation to pip to build with the torch that is already installed: an isolated build
downloads another one first, whose CUDA version may not be that of the nvcc at hand.

Environment:
  SWARM_KV_CUDA         auto (default): build the CUDA library where possible; 1: fail where it is
                        not possible; 0: never
  TORCH_CUDA_ARCH_LIST  GPU architectures, default "8.0;9.0;10.0+PTX"
  MAX_JOBS              compilers to run at once
  SWARM_KV_SANITIZE     passed to -fsanitize= when set, for example "address,undefined"
"""

import glob
import os
import re
import shlex
import shutil
import subprocess
import sys

from setuptools import setup

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = os.path.dirname(os.path.abspath(__file__))
STABLE_ABI_TARGET = "0x020b000000000000"  # torch 2.11
CUDA_LIBRARY_SHARES = ("csrc/ops/tensors.cpp", "csrc/core/signature_options.cpp")
DEFAULT_CUDA_ARCHES = "8.0;9.0;10.0+PTX"


def nvcc_home() -> str | None:
    """The toolkit's own folder. Asked of nvcc, because the nvcc on PATH may be a wrapper script."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    dryrun = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
    if top is not None:
        return os.path.realpath(top[1].strip())
    return os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))


if not os.environ.get("CUDA_HOME") and not os.environ.get("CUDA_PATH"):
    home = nvcc_home()
    if home is not None:
        os.environ["CUDA_HOME"] = home  # read by torch.utils.cpp_extension on import

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        "swarm_kv: torch >= 2.11 is needed to build. Install it first and pass "
        f"--no-build-isolation to pip, or let an isolated build download it. ({error})"
    )


def cuda_obstacle() -> str | None:
    """What keeps the CUDA library from being built, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install a CUDA build of torch"
    if cpp_extension.CUDA_HOME is None:
        return "nvcc is not on PATH; install the CUDA toolkit or set CUDA_HOME"
    nvcc = os.path.join(cpp_extension.CUDA_HOME, "bin", "nvcc")
    if not os.path.exists(nvcc):
        return f"{nvcc} does not exist; set CUDA_HOME to the CUDA toolkit"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+)\.(\d+)", version.stdout)
    if release is None:
        answer = (version.stderr or version.stdout).strip()
        return f"{nvcc} --version did not name its release: {answer}"
    if release[1] != torch.version.cuda.split(".")[0]:
        return (
            f"nvcc is of CUDA {release[1]}.{release[2]} and torch of CUDA {torch.version.cuda}; "
            "install a toolkit of torch's major version"
        )
    return None


def want_cuda() -> bool:
    choice = os.environ.get("SWARM_KV_CUDA", "auto")
    if choice not in ("0", "1", "auto"):
        sys.exit(f"swarm_kv: SWARM_KV_CUDA must be 0, 1 or auto, not {choice!r}")
    if choice == "0":
        return False
    obstacle = cuda_obstacle()
    if obstacle is None:
        return True
    if choice == "1":
        sys.exit(f"swarm_kv: SWARM_KV_CUDA=1, but the CUDA library cannot be built: {obstacle}")
    print(f"swarm_kv: building without the CUDA library: {obstacle}", file=sys.stderr)
    return False


def sources(*patterns: str) -> list[str]:
    paths = (path for pattern in patterns for path in glob.glob(os.path.join(ROOT, pattern)))
    return sorted(os.path.relpath(path, ROOT) for path in paths)


def extensions() -> list:
    headers = sources("csrc/*/*.h", "csrc/*/*/*.h")
    macros = [("TORCH_TARGET_VERSION", STABLE_ABI_TARGET)]
    # Warnings are for our own code: -isystem turns torch's headers into system headers.
    system = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    cxx = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", *system]
    link = ["-Wl,--as-needed"]
    sanitizers = os.environ.get("SWARM_KV_SANITIZE")
    if sanitizers:
        cxx += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g"]
        link.append(f"-fsanitize={sanitizers}")
    else:
        # Python's own flags ask for debug information, which is ten times the size of the code.
        cxx.append("-g0")
        # What is missing shall be missed here, not when the library is loaded.
        link.append("-Wl,-z,defs")
    result = [
        cpp_extension.CppExtension(
            "swarm_kv._C",
            sources("csrc/io/*.cpp", "csrc/core/*.cpp", "csrc/ops/*.cpp", "csrc/ops/cpu/*.cpp"),
            include_dirs=[os.path.join(ROOT, "csrc")],
            define_macros=macros,
            extra_compile_args={"cxx": cxx},
            extra_link_args=[*link, "-luring"],
            depends=headers,
            py_limited_api=True,
        )
    ]
    if want_cuda():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHES)
        result.append(
            cpp_extension.CUDAExtension(
                "swarm_kv._C_cuda",
                sources("csrc/ops/cuda/*.cpp", "csrc/ops/cuda/*.cu", *CUDA_LIBRARY_SHARES),
                include_dirs=[os.path.join(ROOT, "csrc")],
                define_macros=[*macros, ("USE_CUDA", None)],
                extra_compile_args={
                    "cxx": cxx,
                    "nvcc": ["-O3", "-std=c++20", "-Xcompiler", "-fvisibility=hidden"],
                },
                extra_link_args=link,
                depends=headers,
                py_limited_api=True,
            )
        )
    return result


class BuildLibraries(cpp_extension.BuildExtension):
    """Builds the libraries under plain names, incrementally, after checking the system headers."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # An editable install hands in a fresh temporary folder each time, which would recompile
        # everything.
        self.build_temp = os.path.join(ROOT, "build", "objects")

    def build_extensions(self) -> None:
        self.check_system_headers()
        super().build_extensions()

    def check_system_headers(self) -> None:
        compiler = os.environ.get("CXX") or self.compiler.compiler_so_cxx[0]
        flags = [
            flag
            for name in ("CPPFLAGS", "CXXFLAGS")
            for flag in shlex.split(os.environ.get(name, ""))
        ]
        for header, package in (("liburing.h", "liburing-dev"), ("xxhash.h", "libxxhash-dev")):
            probe = subprocess.run(
                [*shlex.split(compiler), *flags, "-E", "-x", "c++", "-"],
                input=f"#include <{header}>\n",
                capture_output=True,
                text=True,
                check=False,
            )
            if probe.returncode != 0:
                sys.exit(
                    f"swarm_kv: the system header {header} was not found by {compiler}. "
                    "swarm_kv needs the Debian/Ubuntu packages liburing-dev and libxxhash-dev "
                    f"(this one is in {package}): apt-get install liburing-dev libxxhash-dev"
                )

    def get_ext_filename(self, ext_name: str) -> str:
        return os.path.join(*ext_name.split(".")) + ".so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: its machine code knows no Python version."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=extensions(), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel}
)
