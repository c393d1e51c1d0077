// What the headers leave out with DDP_SEPARATE_COMPILATION, the definitions that depend on no type of the user's: compiled
// once into a program, with that definition, with the flags of its other files, and with DDP_WITH_TCP, DDP_WITH_MPI, … for
// the components it uses. In CMake target_link_libraries(app PRIVATE ddp::compiled ddp::tcp) says all of it. See
// docs/compiling.md.
#if !defined(DDP_SEPARATE_COMPILATION)
#error "src/ddp.cpp is for programs compiled with -DDDP_SEPARATE_COMPILATION; the others need headers alone"
#endif
#define DDP_SOURCE_FILE
#include <ddp/ddp.hpp>

#include <ddp/checkpoint/impl/directory.ipp>
#include <ddp/checkpoint/impl/manifest.ipp>
#include <ddp/checkpoint/impl/reader.ipp>
#include <ddp/checkpoint/impl/writer.ipp>
#include <ddp/comm/impl/blind_ranks.ipp>
#include <ddp/comm/impl/communication_thread.ipp>
#include <ddp/comm/impl/control_groups.ipp>
#include <ddp/comm/impl/cores.ipp>
#include <ddp/comm/impl/driving_turns.ipp>
#include <ddp/comm/impl/fault.ipp>
#include <ddp/comm/impl/flight_recorder.ipp>
#include <ddp/comm/impl/group.ipp>
#include <ddp/comm/impl/host.ipp>
#include <ddp/comm/impl/scheduler_base.ipp>
#include <ddp/comm/impl/verdict.ipp>
#include <ddp/core/impl/digest.ipp>
#include <ddp/core/impl/error.ipp>
#include <ddp/core/impl/task.ipp>
#include <ddp/core/impl/text.ipp>
#include <ddp/data/impl/cifar.ipp>
#include <ddp/data/impl/classification.ipp>
#include <ddp/data/impl/csv.ipp>
#include <ddp/data/impl/idx.ipp>
#include <ddp/data/impl/json_reader.ipp>
#include <ddp/data/impl/npy.ipp>
#include <ddp/data/impl/safetensors.ipp>
#include <ddp/data/impl/safetensors_header.ipp>
#include <ddp/data/impl/safetensors_parser.ipp>
#include <ddp/data/impl/sampler.ipp>
#include <ddp/data/impl/source.ipp>
#include <ddp/data/impl/whole_file.ipp>
#include <ddp/model/impl/layout.ipp>
#include <ddp/optim/impl/any_optimizer.ipp>
#include <ddp/optim/impl/schedule.ipp>
#include <ddp/rendezvous/impl/environment.ipp>
#include <ddp/rendezvous/impl/environment_view.ipp>
#include <ddp/rendezvous/impl/job_claim.ipp>
#include <ddp/rendezvous/impl/job_secret.ipp>
#include <ddp/rendezvous/impl/port_holder.ipp>
#include <ddp/rendezvous/impl/run.ipp>
#include <ddp/rendezvous/impl/slurm_node_list.ipp>
#include <ddp/strategy/local_step.hpp>
#include <ddp/strategy/meetings.hpp>
#include <ddp/train/impl/bucket.ipp>
#include <ddp/train/impl/counters_text.ipp>
#include <ddp/train/impl/frozen.ipp>
#include <ddp/train/impl/late_gather.ipp>
#include <ddp/train/impl/model_claim.ipp>
#include <ddp/train/impl/nonfinite.ipp>
#include <ddp/train/impl/odd_ranks.ipp>
#include <ddp/train/impl/options.ipp>
#include <ddp/train/impl/plan_exchange.ipp>
#include <ddp/train/impl/ready_reports.ipp>
#include <ddp/train/impl/step_roots.ipp>
#include <ddp/transport/impl/inproc.ipp>
#include <ddp/transport/shm/impl/memfd.ipp>
#include <ddp/transport/shm/impl/memory_limits.ipp>
#include <ddp/transport/virtual/impl/virtual_world.ipp>

#if defined(DDP_WITH_TCP)
#include <ddp/rendezvous/impl/bootstrap.ipp>
#include <ddp/rendezvous/impl/run_tcp.ipp>
#endif

#if defined(DDP_WITH_SECURE)
#include <ddp/rendezvous/impl/run_secure.ipp>
#include <ddp/rendezvous/impl/secure_channel.ipp>
#endif

#if defined(DDP_WITH_MPI)
#include <ddp/rendezvous/impl/run_mpi.ipp>
#include <ddp/transport/mpi/impl/mpi.ipp>
#endif

#if defined(DDP_WITH_NN)
#include <ddp/nn/nn.hpp>

#include <ddp/nn/impl/layer.ipp>
#endif
