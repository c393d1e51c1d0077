// As mistakes.cpp: a model of layers.
#include <ddp/nn/nn.hpp>

namespace nn = ddp::nn;

void mixes_precisions_of_layers() {
#ifdef CORRECTED
    nn::sequential net{nn::linear<double>(2, 3), nn::relu<double>(), nn::mean_squared_error<double>()};
#else
    // expect: all layers and the loss have to be of one element type
    nn::sequential net{nn::linear<double>(2, 3), nn::relu<float>(), nn::mean_squared_error<float>()};
#endif
}
