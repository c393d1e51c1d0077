# Headers, the CMake package, pkg-config files. Architecture-independent: all of it lives in include/ and share/.
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/ddp")

install(TARGETS ddp ddp_compiled ddp_conformance EXPORT ddp-targets FILE_SET HEADERS COMPONENT dev)
cmake_path(GET DDP_COMPILED_SOURCE PARENT_PATH source_dir)
install(FILES "${PROJECT_SOURCE_DIR}/src/ddp.cpp" DESTINATION "${source_dir}" COMPONENT dev)
install(EXPORT ddp-targets NAMESPACE ddp:: DESTINATION "${package_dir}" COMPONENT dev)
foreach(component IN LISTS DDP_COMPONENTS)  # an export of its own each: the others' libraries need not exist where one is used
  install(TARGETS ddp_${component} EXPORT ddp-${component}-targets FILE_SET HEADERS COMPONENT dev)
  install(EXPORT ddp-${component}-targets NAMESPACE ddp:: DESTINATION "${package_dir}" COMPONENT dev)
endforeach()

configure_package_config_file(cmake/ddp-config.cmake.in "${PROJECT_BINARY_DIR}/ddp-config.cmake"
  INSTALL_DESTINATION "${package_dir}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/ddp-config-version.cmake"
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)  # until 1.0, a minor version may break
install(FILES "${PROJECT_BINARY_DIR}/ddp-config.cmake" "${PROJECT_BINARY_DIR}/ddp-config-version.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/ddp-components.cmake" DESTINATION "${package_dir}" COMPONENT dev)

# ddp_pkg_config(<name> <description> [REQUIRES …] [PRIVATE …] [CFLAGS …] [LIBS …]): a pkg-config file; a package that is
# included and not linked is private. Its variable `source` is the file that -DDDP_SEPARATE_COMPILATION asks for.
set(pc_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")
file(RELATIVE_PATH DDP_PC_PREFIX "/${pc_dir}" "/")
function(ddp_pkg_config name description)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "REQUIRES;PRIVATE;CFLAGS;LIBS")
  foreach(list IN ITEMS REQUIRES PRIVATE CFLAGS LIBS)
    list(JOIN arg_${list} " " ${list})
  endforeach()
  configure_file(cmake/ddp.pc.in "${PROJECT_BINARY_DIR}/${name}.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/${name}.pc" DESTINATION "${pc_dir}" COMPONENT dev)
endfunction()
ddp_pkg_config(ddp "${PROJECT_DESCRIPTION}" CFLAGS "-I\${includedir}" -pthread LIBS -pthread)
ddp_pkg_config(ddp-tcp "ddp between processes, by Boost.Asio's headers and xxHash's" REQUIRES ddp PRIVATE libxxhash
  CFLAGS -DDDP_WITH_TCP)
ddp_pkg_config(ddp-secure "ddp between hosts with a secret, by OpenSSL" REQUIRES ddp-tcp openssl CFLAGS -DDDP_WITH_SECURE)
ddp_pkg_config(ddp-nn "ddp's layers, on Eigen" REQUIRES ddp eigen3 CFLAGS -DDDP_WITH_NN)
ddp_pkg_config(ddp-gzip "ddp's reader of compressed files, on zlib" REQUIRES ddp zlib CFLAGS -DDDP_WITH_GZIP)
ddp_pkg_config(ddp-mpi "ddp over MPI; compile with MPI's own wrapper, mpicxx" REQUIRES ddp
  CFLAGS -D${DDP_mpi_DEFINITIONS} -DDDP_WITH_MPI LIBS -lboost_mpi -lboost_serialization -ldl)

install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT license)

set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME tools)  # what others install from here on
if(PROJECT_IS_TOP_LEVEL AND EXISTS "${PROJECT_SOURCE_DIR}/packaging/debian")  # archives may leave it out
  include(cmake/packaging.cmake)
endif()
