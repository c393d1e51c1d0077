/// \file
/// The protocol between a rank and the store during start-up.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/version.hpp>
#include <ddp/rendezvous/job_secret.hpp>

namespace ddp::detail {

/// The first bytes of a client, which say who it is. A connection that begins differently is a stranger's, and is not
/// parsed further.
struct store_hello {
    static constexpr std::uint64_t expected_magic = 0x31657267'70646421u;
    std::uint64_t magic = expected_magic;
    std::uint32_t version = version_number;
    std::uint32_t record_bytes = sizeof(failure);  // two builds that differ here cannot communicate
    std::int32_t rank = 0;
    std::int32_t size = 0;
    std::uint64_t job = 0;  // the hash of job::id
    bounded_text<72> who;
    job_secret secret = {};
};
static_assert(sizeof(store_hello) == 168 && std::has_unique_object_representations_v<store_hello>);

enum class store_op : std::uint32_t { put = 1, all, fail, ok, refused, alive };

/// Precedes each request and answer after the hello. put: key and value; all: key is a prefix, count the number of
/// entries to wait for. alive: nothing follows, and there is no answer; each side sends it every timing.heartbeat. A
/// server that knows of a failure sends refused, and the reason, unasked.
struct store_head {
    static constexpr std::uint32_t max_key = 64, max_value = 4096;
    store_op op = store_op::ok;
    std::uint32_t key = 0;    // bytes
    std::uint32_t value = 0;  // bytes
    std::uint32_t count = 0;
};
static_assert(std::has_unique_object_representations_v<store_head>);

inline void append(std::string& to, const_bytes bytes) {
    to.append(reinterpret_cast<char const*>(bytes.data()), bytes.size());
}

}  // namespace ddp::detail
