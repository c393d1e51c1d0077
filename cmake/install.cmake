# Headers, the CMake package, a pkg-config file. Architecture-independent: all of it lives in include/ and share/.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/ddp")

install(TARGETS ddp EXPORT ddp-targets FILE_SET HEADERS)
install(EXPORT ddp-targets NAMESPACE ddp:: DESTINATION "${package_dir}")
foreach(door IN LISTS DDP_DOORS)  # an export of its own each: the others' libraries need not exist where one is used
  install(TARGETS ddp_${door} EXPORT ddp-${door}-targets FILE_SET HEADERS)
  install(EXPORT ddp-${door}-targets NAMESPACE ddp:: DESTINATION "${package_dir}")
endforeach()

configure_package_config_file(cmake/ddp-config.cmake.in "${PROJECT_BINARY_DIR}/ddp-config.cmake"
  INSTALL_DESTINATION "${package_dir}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/ddp-config-version.cmake"
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)  # until 1.0, a minor version may break
install(FILES "${PROJECT_BINARY_DIR}/ddp-config.cmake" "${PROJECT_BINARY_DIR}/ddp-config-version.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/ddp-doors.cmake" DESTINATION "${package_dir}")

set(pc_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")
file(RELATIVE_PATH DDP_PC_PREFIX "/${pc_dir}" "/")
configure_file(cmake/ddp.pc.in "${PROJECT_BINARY_DIR}/ddp.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/ddp.pc" DESTINATION "${pc_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
