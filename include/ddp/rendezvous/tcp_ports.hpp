/// \file
/// tcp_ports: where a rank listens for the other ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/environment_view.hpp>
#include <ddp/rendezvous/rendezvous_error.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>

namespace ddp::detail {

/// See tcp_options::ports: the first and the last; 0 and 0: any.
[[gnu::cold]] inline std::pair<int, int> port_range(std::string const& text) {
    if (text.empty()) return {0, 0};
    std::size_t const dash = std::min(text.find('-'), text.size());
    try {
        auto const number = [](std::string_view part, int least) {
            return environment_number("", part, least, 65535, "");
        };
        int const first = number(std::string_view(text).substr(0, dash), 1);
        return {first, dash == text.size() ? first : number(std::string_view(text).substr(dash + 1), first)};
    } catch (environment_error const&) {
        throw environment_error(concat({"DDP_PORTS is \"", printable(std::string_view(text).substr(0, 80)),
                                        "\"; expected ports from 1 to 65535 such as 20000-20063, the lowest first"}));
    }
}

/// Listens for the other ranks.
[[gnu::cold]] inline tcp_acceptor listen_as_rank(int rank, int size, boost::asio::ip::address const& address,
                                                 std::pair<int, int> ports) {
    tcp_acceptor acceptor(tcp_context());
    boost::system::error_code error;
    for (int port = ports.first; port <= ports.second; ++port) {
        error = listen_at(acceptor, {address, static_cast<std::uint16_t>(port)});
        if (error != boost::asio::error::address_in_use) break;
    }
    if (error == boost::asio::error::address_in_use)
        throw rendezvous_error(
            concat({"rank ", rank, " cannot listen on ", address.to_string(), ": ports ", ports.first, " to ",
                    ports.second, " are in use. DDP_PORTS (tcp_options.ports) must have one for each rank of a host"}));
    if (out_of_descriptors(error)) throw too_many_files(rank, size, "a socket for the other ranks", error.value());
    if (error)
        throw rendezvous_error(
            concat({"rank ", rank, " cannot listen on ", address.to_string(), ": ", error.message()}));
    return acceptor;
}

}  // namespace ddp::detail
