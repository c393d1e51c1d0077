"""Conan 2 recipe of the tree it lies in: conan create packaging/conan. Not run here: written by Conan's manual."""
import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, load

TREE = ("include/*", "cmake/*", "CMakeLists.txt", "LICENSE")


class DdpConan(ConanFile):
    name = "ddp"
    license = "BSL-1.0"
    description = "Header-only C++20 library for distributed data-parallel training"
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {name: [True, False] for name in ("tcp", "secure", "mpi", "nn", "gzip")}
    default_options = {"tcp": True, "secure": False, "mpi": False, "nn": True, "gzip": False}
    no_copy_source = True

    def set_version(self):
        header = load(self, os.path.join(self.recipe_folder, "../../include/ddp/core/version.hpp"))
        self.version = ".".join(re.search(rf"version_{part} = (\d+)", header)[1] for part in ("major", "minor", "patch"))

    def export_sources(self):
        for pattern in TREE:
            copy(self, pattern, os.path.join(self.recipe_folder, "../.."), self.export_sources_folder)

    def validate(self):
        check_min_cppstd(self, 20)

    def requirements(self):
        if self.options.tcp or self.options.secure:
            self.requires("xxhash/[>=0.8]")
        if self.options.secure:
            self.requires("openssl/[>=3.0]")
        if self.options.tcp or self.options.secure or self.options.mpi:
            self.requires("boost/[>=1.74]", options={"without_mpi": not self.options.mpi})
        if self.options.nn:
            self.requires("eigen/[>=3.4]")
        if self.options.gzip:
            self.requires("zlib/[>=1.2.11]")

    def package_id(self):
        self.info.clear()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        copy(self, "*.hpp", os.path.join(self.source_folder, "include"), os.path.join(self.package_folder, "include"))

    def package_info(self):
        self.cpp_info.set_property("cmake_file_name", "ddp")
        core = self.cpp_info.components["core"]
        core.set_property("cmake_target_name", "ddp::ddp")
        core.system_libs = ["pthread"]
        suite = self.cpp_info.components["conformance"]
        suite.set_property("cmake_target_name", "ddp::conformance")
        suite.requires = ["core"]
        components = {
            "tcp": ["boost::headers", "xxhash::xxhash"],
            "secure": ["boost::headers", "xxhash::xxhash", "openssl::ssl"],
            "mpi": ["boost::mpi"],
            "nn": ["eigen::eigen"],
            "gzip": ["zlib::zlib"],
        }
        for name, libraries in components.items():
            if self.options.get_safe(name):
                component = self.cpp_info.components[name]
                component.set_property("cmake_target_name", f"ddp::{name}")
                component.requires = ["core", *libraries]
                if name == "mpi":
                    component.defines = ["OMPI_SKIP_MPICXX"]
        for component in self.cpp_info.components.values():
            component.bindirs = component.libdirs = []
