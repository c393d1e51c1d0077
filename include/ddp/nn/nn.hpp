/// \file
/// The whole room: layers, losses and sequential, on Eigen.
#pragma once

#include <ddp/nn/activation.hpp>
#include <ddp/nn/batch.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>
#include <ddp/nn/sequential.hpp>
