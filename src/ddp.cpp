// The library's definitions that depend on no type of the user's, compiled once: what DDP_SEPARATE_COMPILATION leaves out of
// headers. The CMake target ddp::compiled adds this file to the program; docs/compiling.md says when.
#define DDP_SOURCE_FILE

#include <ddp/ddp.hpp>

#include <ddp/comm/impl/fault.ipp>
#include <ddp/comm/impl/group.ipp>
#include <ddp/comm/impl/host.ipp>
#include <ddp/comm/impl/scheduler_base.ipp>
#include <ddp/comm/impl/verdict.ipp>
#include <ddp/core/impl/text.ipp>
#include <ddp/model/impl/layout.ipp>
#include <ddp/train/impl/bucket.ipp>
#include <ddp/transport/impl/inproc.ipp>
