#include <ddp/rendezvous/run_tcp.hpp>

#include "training.hpp"

int main() {
    return ddp::run_main<ddp::threads, ddp::tcp>({.ranks = 3}, train);
}
