// The library's definitions that depend on no type of the user's, compiled once: what DDP_SEPARATE_COMPILATION leaves out of
// headers. The CMake target ddp::compiled adds this file to the program; docs/compiling.md says when.
//
// Each door that the program links is compiled too: its target defines DDP_DOOR_<name>. Without CMake, define them by hand.
#define DDP_SOURCE_FILE
#include <ddp/ddp.hpp>

#include <ddp/comm/impl/fault.ipp>
#include <ddp/comm/impl/group.ipp>
#include <ddp/comm/impl/host.ipp>
#include <ddp/comm/impl/scheduler_base.ipp>
#include <ddp/comm/impl/verdict.ipp>
#include <ddp/core/impl/digest.ipp>
#include <ddp/core/impl/error.ipp>
#include <ddp/core/impl/task.ipp>
#include <ddp/core/impl/text.ipp>
#include <ddp/model/impl/layout.ipp>
#include <ddp/rendezvous/impl/run.ipp>
#include <ddp/train/impl/bucket.ipp>
#include <ddp/train/impl/ready_reports.ipp>
#include <ddp/transport/impl/inproc.ipp>

#if defined(DDP_DOOR_TCP)
#include <ddp/rendezvous/impl/bootstrap.ipp>
#include <ddp/rendezvous/impl/environment.ipp>
#include <ddp/rendezvous/impl/run_tcp.ipp>
#endif

#if defined(DDP_DOOR_MPI)
#include <ddp/rendezvous/impl/run_mpi.ipp>
#endif

#if defined(DDP_DOOR_NN)
#include <ddp/nn/nn.hpp>
#endif
