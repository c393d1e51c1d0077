# `cpack -G DEB` in the build directory makes Debian packages: libddp-dev (headers, for every architecture), ddprun, and ddp-perf,
# which is apart because it may link MPI.
# Only what Debian asks of a package beyond an installation is in packaging/debian/.
set(debian "${PROJECT_SOURCE_DIR}/packaging/debian")
set(CPACK_PACKAGE_CONTACT "ddp maintainers <ddp@localhost>" CACHE STRING "Maintainer of the Debian packages: Name <address>")

file(READ "${PROJECT_SOURCE_DIR}/LICENSE" license)
string(REGEX REPLACE "\n\n" "\n.\n" license "${license}")
string(REGEX REPLACE "\n+$" "" license "${license}")
string(REPLACE "\n" "\n " license " ${license}")
string(TIMESTAMP year "%Y" UTC)
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)  # SOURCE_DATE_EPOCH's, where that is set
configure_file("${debian}/copyright.in" "${PROJECT_BINARY_DIR}/debian/copyright" @ONLY)

# ddp_debian_files(<component> <package>): part of that package alone, not of other installations
function(ddp_debian_files component package)
  configure_file("${debian}/changelog.in" "${PROJECT_BINARY_DIR}/debian/${package}/changelog" @ONLY)
  set(docs "${PROJECT_BINARY_DIR}/debian/${package}/changelog.gz")
  execute_process(COMMAND gzip --best --no-name --stdout "${PROJECT_BINARY_DIR}/debian/${package}/changelog"
    OUTPUT_FILE "${docs}" ERROR_QUIET)
  install(FILES "${PROJECT_BINARY_DIR}/debian/copyright" "${docs}" DESTINATION share/doc/${package}
    COMPONENT ${component} EXCLUDE_FROM_ALL)
endfunction()

set(CPACK_GENERATOR DEB)
set(CPACK_COMPONENTS_ALL dev)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
  OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)

# A component's library is needed by programs that use the component: recommended, and MPI, which is large, suggested.
ddp_debian_files(dev libddp-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_NAME libddp-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_ARCHITECTURE all)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_RECOMMENDS "libboost-dev (>= 1.74), libxxhash-dev, libssl-dev (>= 3.0), libeigen3-dev (>= 3.4), zlib1g-dev")
set(CPACK_DEBIAN_DEV_PACKAGE_SUGGESTS "ddprun, libboost-mpi-dev (>= 1.74), libopenmpi-dev, openmpi-bin, pkg-config")
set(CPACK_DEBIAN_DEV_DESCRIPTION "distributed data-parallel training in C++20 (headers)
ddp trains one model on many processes as if they were one: the same mean
gradient and the same bits on every rank, communication hidden behind the
backward pass, and an error that names the culprit instead of a hang.
.
This package has the header-only library, a CMake package and pkg-config
files. TCP needs Boost.Asio and xxHash, and OpenSSL between hosts; the
layers need Eigen, compressed data needs zlib, and MPI needs Boost.MPI.")

# ddp_debian_tool(<component> <package>): a program, its manual page, and the libraries that it needs
macro(ddp_debian_tool component package)
  list(APPEND CPACK_COMPONENTS_ALL ${component})
  ddp_debian_files(${component} ${package})
  execute_process(COMMAND gzip --best --no-name --stdout "${debian}/${package}.1"
    OUTPUT_FILE "${PROJECT_BINARY_DIR}/debian/${package}.1.gz" ERROR_QUIET)
  install(FILES "${PROJECT_BINARY_DIR}/debian/${package}.1.gz" DESTINATION share/man/man1 COMPONENT ${component}
    EXCLUDE_FROM_ALL)
  string(TOUPPER ${component} COMPONENT)
  set(CPACK_DEBIAN_${COMPONENT}_PACKAGE_NAME ${package})
  set(CPACK_DEBIAN_${COMPONENT}_PACKAGE_SECTION utils)
  set(CPACK_DEBIAN_${COMPONENT}_PACKAGE_SHLIBDEPS ON)
endmacro()
if(DDP_BUILD_TOOLS)
  ddp_debian_tool(tools ddprun)
  set(CPACK_DEBIAN_TOOLS_DESCRIPTION "launcher of distributed training programs
ddprun starts the ranks of a program on one machine or several, tells each
its rank and where to meet, shows what they print, and ends all of them
when one fails. The environment it sets is torchrun's, so it starts other
programs that read RANK and WORLD_SIZE as well.")
endif()
if(DDP_BUILD_TOOLS AND TARGET ddp::secure)
  ddp_debian_tool(perf ddp-perf)
  set(CPACK_DEBIAN_PERF_PACKAGE_DEPENDS ddprun)
  set(CPACK_DEBIAN_PERF_DESCRIPTION "measures collective operations between processes
ddp-perf times allreduce, broadcast and the other collectives of the ddp
library for a range of sizes, over TCP, MPI or between threads. It prints
time and bandwidth, verifies results, and writes JSON and plots.")
endif()
include(CPack)
