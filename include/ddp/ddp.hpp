/// \file
/// Everything that needs only the standard library. Headers that need another library are included on their own:
/// <ddp/rendezvous/run_tcp.hpp> (Asio), <ddp/rendezvous/run_mpi.hpp> (MPI), <ddp/nn/nn.hpp> (Eigen), <ddp/data/gzip.hpp> (zlib).
#pragma once

#include <ddp/core/language.hpp>  // first

#include <ddp/collective/algorithms/any_allreduce.hpp>
#include <ddp/collective/all_gather.hpp>
#include <ddp/collective/all_to_all.hpp>
#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/broadcast.hpp>
#include <ddp/collective/gather.hpp>
#include <ddp/collective/point_to_point.hpp>
#include <ddp/collective/reduce.hpp>
#include <ddp/collective/reduce_scatter.hpp>
#include <ddp/collective/scatter.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/core/random.hpp>
#include <ddp/core/version.hpp>
#include <ddp/data/batch_loader.hpp>
#include <ddp/data/classification.hpp>
#include <ddp/data/safetensors.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/adagrad.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/lamb.hpp>
#include <ddp/optim/lars.hpp>
#include <ddp/optim/lion.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/optim/rmsprop.hpp>
#include <ddp/optim/schedule.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/train/early_stopping.hpp>
#include <ddp/train/evaluate.hpp>
#include <ddp/train/replica.hpp>
#include <ddp/train/weights.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/inproc.hpp>
