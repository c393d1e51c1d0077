#pragma once

#include <ddp/transport/any.hpp>

/// Sums the ranks' numbers, and prints the sum on rank 0. An ordinary function, over any transport.
void train(ddp::communicator<>& comm);
