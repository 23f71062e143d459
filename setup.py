"""Builds the C++ engine with CMake and adds it to the wheel."""

import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


HEADERS = Path("components/kvx/include")
LIBRARIES = (Path("lmdeploy/libkvx.so.1"), Path("lmdeploy/libturbomind_cuda.so"))


class CMakeBuild(build_ext):
    """Runs CMake and adds the module, libkvx with its headers, and the CUDA library to the package.

    `CMAKE_ARGS=-DTM_CUDA=ON` builds the CUDA library. cmake/cuda.cmake lists its options. A wheel
    has the kernels of every CPU, and an editable install those of this machine (`TM_CPU_ISAS`).
    """

    def build_extension(self, ext: Extension) -> None:
        """Build `ext` with the variables `CMAKE_ARGS` and `CMAKE_BUILD_PARALLEL_LEVEL`."""
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = self._build_folder()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "--fresh",  # an earlier build has remembered a ninja that pip has deleted
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
            f"-DTM_CPU_ISAS={'native' if self.editable_mode else 'all'}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        subprocess.run(configure, check=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 2))
        subprocess.run(
            ["cmake", "--build", str(build), "--target", "tm_package", "-j", jobs], check=True
        )
        if not self.editable_mode:  # an editable install reads them where they are
            shutil.copytree(ROOT / HEADERS, target / "include", dirs_exist_ok=True)

    def _build_folder(self) -> Path:
        """Return the build folder. An editable install keeps it, so that it can rebuild fast."""
        if not self.editable_mode:
            return Path(self.build_temp).resolve()
        names = ("CMAKE_ARGS", "CC", "CXX", "CFLAGS", "CXXFLAGS")
        options = "\n".join([sys.executable, *(os.environ.get(name, "") for name in names)])
        return ROOT / "build" / f"editable-{zlib.crc32(options.encode()):08x}"

    def copy_extensions_to_source(self) -> None:
        """Copy the module and the libraries into the source tree, for an editable install."""
        super().copy_extensions_to_source()
        for library in LIBRARIES:
            built = Path(self.build_lib) / library
            if built.is_file():
                self.copy_file(str(built), str(ROOT / library))


setup(ext_modules=[Extension("lmdeploy._turbomind", [])], cmdclass={"build_ext": CMakeBuild})
