"""Builds the C++ engine with CMake and packs it into the wheel."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


CUDA_LIBRARY = Path("lmdeploy/libturbomind_cuda.so")


class CMakeBuild(build_ext):
    """Runs CMake once and puts the module into the package, with the CUDA library if it is built.

    `CMAKE_ARGS=-DTM_CUDA=ON` asks for it; cmake/cuda.cmake has the options.
    """

    def build_extension(self, ext: Extension) -> None:
        """Build `ext`; `CMAKE_ARGS` and `CMAKE_BUILD_PARALLEL_LEVEL` are honored."""
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = self._build_folder()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        subprocess.run(configure, check=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 2))
        subprocess.run(
            ["cmake", "--build", str(build), "--target", "tm_package", "-j", jobs], check=True
        )

    def _build_folder(self) -> Path:
        """Of an editable install one that stays, so that the next compiles what has changed."""
        if not self.editable_mode:
            return Path(self.build_temp).resolve()
        names = ("CMAKE_ARGS", "CC", "CXX", "CFLAGS", "CXXFLAGS")
        options = "\n".join([sys.executable, *(os.environ.get(name, "") for name in names)])
        return ROOT / "build" / f"editable-{zlib.crc32(options.encode()):08x}"

    def copy_extensions_to_source(self) -> None:
        """For an editable install: the module, and the CUDA library."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / CUDA_LIBRARY
        if built.is_file():
            self.copy_file(str(built), str(ROOT / CUDA_LIBRARY))


setup(ext_modules=[Extension("lmdeploy._turbomind", [])], cmdclass={"build_ext": CMakeBuild})
