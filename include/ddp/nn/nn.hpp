/// \file
/// The whole module: layers, losses and sequential, on Eigen.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <ddp/data/batch.hpp>
#include <ddp/nn/activation.hpp>
#include <ddp/nn/batch_norm.hpp>
#include <ddp/nn/conv2d.hpp>
#include <ddp/nn/dropout.hpp>
#include <ddp/nn/embedding.hpp>
#include <ddp/nn/flatten.hpp>
#include <ddp/nn/gelu.hpp>
#include <ddp/nn/image.hpp>
#include <ddp/nn/layer.hpp>
#include <ddp/nn/layer_norm.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>
#include <ddp/nn/pool2d.hpp>
#include <ddp/nn/sequential.hpp>
