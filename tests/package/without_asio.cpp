// Part of a program whose library code is compiled once: none of its own files includes a transport's library.
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

#if !defined(DDP_SEPARATE_COMPILATION)
#error "ddp::compiled has not told this file"
#endif
#if defined(BOOST_ASIO_DETAIL_CONFIG_HPP) || defined(XXH_VERSION_NUMBER)
#error "a header includes Asio or xxHash, though src/ddp.cpp compiles what needs them"
#endif
