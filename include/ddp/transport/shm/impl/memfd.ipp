/// \file
/// What transport/shm/memfd.hpp declares.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include <ddp/core/secret_bytes.hpp>
#include <ddp/core/text.hpp>
#include <ddp/transport/shm/memfd.hpp>
#include <ddp/transport/shm/memory_limits.hpp>

namespace ddp {

namespace detail {

/// What comes with the memory that is offered, and begins it.
[[nodiscard, gnu::cold]] inline std::array<std::uint64_t, 2> secret_of(memory_offer const& offer) noexcept {
    return {offer.where[2], offer.where[3]};
}

/// The abstract name of a socket, from 128 random bits.
[[gnu::cold]] DDP_DECL ::socklen_t memfd_address(::sockaddr_un& to, std::uint64_t high, std::uint64_t low) noexcept {
    static constexpr char digits[] = "0123456789abcdef";
    static constexpr char prefix[] = "ddp-";
    to = {};
    to.sun_family = AF_UNIX;
    char* at = std::copy_n(prefix, sizeof prefix - 1, to.sun_path + 1);  // a first byte of zero: abstract
    for (std::uint64_t const part : {high, low})
        for (int shift = 60; shift >= 0; shift -= 4) *at++ = digits[(part >> shift) & 15];
    return static_cast<::socklen_t>(at - reinterpret_cast<char*>(&to));
}

/// Header and memory, in whole pages.
[[nodiscard]] DDP_DECL std::size_t memfd_bytes(std::size_t bytes) noexcept {
    constexpr std::size_t page = memory_sharing::header_bytes;
    return page + (bytes + page - 1) / page * page;
}

/// MiB, rounded up.
[[nodiscard]] DDP_DECL std::size_t memfd_mib(std::size_t bytes) noexcept {
    return (bytes + (std::size_t{1} << 20) - 1) >> 20;
}

/// `whole`: with its page table, which takes time; others are filled as they are used.
[[gnu::cold]] DDP_DECL std::byte* map_memfd(int descriptor, std::size_t bytes, bool whole) noexcept {
    int const flags = MAP_SHARED | (whole ? MAP_POPULATE : 0);
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
    return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
}

[[gnu::cold]] DDP_DECL std::shared_ptr<std::byte> own_mapping(std::byte* at, std::size_t bytes) {
    return {at, [bytes](std::byte* mapped) { ::munmap(mapped, bytes); }};
}

}  // namespace detail

[[gnu::cold]] DDP_DECL memfd_sharing::~memfd_sharing() {
    memfd_sharing::settle();
}

[[gnu::cold]] DDP_DECL void memfd_sharing::settle() noexcept {
    for (int* const one : {&memory_, &socket_})
        if (*one >= 0) ::close(std::exchange(*one, -1));
    for (taken const& one : taken_)
        if (one.descriptor >= 0) ::close(one.descriptor);
    taken_.clear();
}

[[gnu::cold]] DDP_DECL void memfd_sharing::note(std::uint64_t refused, char const* what, int error) noexcept {
    if (problem_.refused == 1) return;
    std::array<char, 128> text{};
    std::snprintf(text.data(), text.size(), "%s%s%s", what, error == 0 ? "" : ": ",
                  error == 0 ? "" : std::strerror(error));
    problem_.refused = refused;
    problem_.text = std::string_view(text.data());
}

[[gnu::cold]] DDP_DECL std::shared_ptr<std::byte> memfd_sharing::make(std::size_t bytes, memory_offer& mine) {
    std::size_t const total = detail::memfd_bytes(bytes);
    auto* const mib = &detail::memfd_mib;
    std::string const size = detail::concat({mib(total), " MiB"});
    auto const refuse = [&](char const* what) {
        std::string const text = detail::concat({what, ": ", std::strerror(errno)});
        mine.text = std::string_view(text);
        return nullptr;
    };
    auto const no_room = [](std::string const& what) {
        throw std::runtime_error(detail::concat({what, ": ", std::strerror(errno)}));
    };
    ::rlimit most{};  // a larger file would end the process by SIGXFSZ
    errno = EFBIG;
    if (::getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < total) return refuse("ulimit -f");
    memory_ = ::memfd_create("ddp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory_ < 0) return refuse("memfd_create");
    std::array<std::uint64_t, 4> random{};
    if (::getentropy(random.data(), sizeof random) != 0) return refuse("getentropy");
    socket_ = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_ < 0) return refuse("a Unix-domain socket");
    ::sockaddr_un name;
    ::socklen_t const length = detail::memfd_address(name, random[0], random[1]);
    if (::bind(socket_, reinterpret_cast<::sockaddr*>(&name), length) != 0)
        return refuse("a Unix-domain socket's name");

    // In steps, each after a check of what is left: beyond a cgroup's limit no call fails, but the kernel kills.
    detail::memory_limits const limits;
    for (std::size_t done = 0, most_at_once = total, interrupted = 0; done < total;) {
        detail::memory_limits::room const left = limits.left();
        if (!detail::memory_limits::fits(left, total - done))
            throw std::runtime_error(detail::concat(
                {size, ": ", mib(total - done), " are missing and ", left.bytes >> 20, " left (", left.limit, ")"}));
        std::size_t const step = std::min(detail::memory_limits::step(left, total - done), most_at_once);
        int const problem = ::posix_fallocate(memory_, static_cast<::off_t>(done), static_cast<::off_t>(step));
        errno = problem;
        // Before Linux 6.10 a signal undoes all of it, and a profiler sends one every few milliseconds.
        if (problem == EINTR && ++interrupted < 100)
            most_at_once = std::max(step / 2, detail::memfd_bytes(0));
        else if (problem != 0)
            no_room(size);
        else {
            done += step;
            interrupted = 0;
        }
    }
    if (::fcntl(memory_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return refuse("F_ADD_SEALS");
    own_ = detail::map_memfd(memory_, total, true);
    if (own_ == nullptr) no_room(size + " of address space");
    std::shared_ptr<std::byte> memory = detail::own_mapping(own_, total);
    secret_ = {random[2], random[3]};
    std::memcpy(own_, secret_.data(), sizeof secret_);
    mine.where = random;
    return memory;
}

[[gnu::cold]] DDP_DECL bool memfd_sharing::give(memory_offer const& peer) noexcept {
    ::sockaddr_un name;
    ::iovec words{secret_.data(), sizeof secret_};
    alignas(::cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    ::msghdr message{};
    message.msg_namelen = detail::memfd_address(name, peer.where[0], peer.where[1]);
    message.msg_name = &name;
    message.msg_iov = &words;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    ::cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &memory_, sizeof memory_);
    ::ssize_t const sent = ::sendmsg(socket_, &message, MSG_NOSIGNAL);
    bool const full = sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS);  // for now: see give()
    if (sent < 0 && !full) note(2, "sendmsg", errno);
    return sent == static_cast<::ssize_t>(sizeof secret_);
}

[[gnu::cold]] DDP_DECL void memfd_sharing::take(std::span<memory_offer const> all) noexcept {
    for (int visits = 0; visits < 64; ++visits) {  // a stranger may send as fast as this reads
        taken one{{}, -1};
        ::iovec words{one.secret.data(), sizeof one.secret};
        alignas(::cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
        ::msghdr message{};
        message.msg_iov = &words;
        message.msg_iovlen = 1;
        message.msg_control = control.data();
        message.msg_controllen = CMSG_LEN(sizeof(int));  // not CMSG_SPACE, in which a second one would have room
        ::ssize_t const got = ::recvmsg(socket_, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK) note(2, "recvmsg", errno);
        if (got < 0) return;
        ::cmsghdr const* const header = CMSG_FIRSTHDR(&message);
        if (header == nullptr && (message.msg_flags & MSG_CTRUNC) != 0)
            note(2, "a descriptor was not let through: ulimit -n, or a sandbox", 0);
        if (header == nullptr || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS ||
            header->cmsg_len < CMSG_LEN(sizeof(int)))
            continue;
        std::memcpy(&one.descriptor, CMSG_DATA(header), sizeof one.descriptor);
        bool const known = got == static_cast<::ssize_t>(sizeof one.secret) &&
                           std::any_of(all.begin(), all.end(), [&](memory_offer const& offer) {
                               return detail::same_secret(one.secret, detail::secret_of(offer));
                           });
        bool kept = false;
        if (known) try {
                taken_.push_back(one);
                kept = true;
            } catch (std::bad_alloc const&) {  // then this rank cannot see that rank's memory
            }
        if (!kept) ::close(one.descriptor);
    }
}

[[gnu::cold]] DDP_DECL std::shared_ptr<std::byte> memfd_sharing::view(memory_offer const& peer) noexcept try {
    std::size_t const total = detail::memfd_bytes(peer.bytes);
    for (taken& one : taken_) {
        if (one.descriptor < 0 || !detail::same_secret(one.secret, detail::secret_of(peer))) continue;
        struct ::stat status{};
        int const seals = ::fcntl(one.descriptor, F_GET_SEALS);
        bool const sound = ::fstat(one.descriptor, &status) == 0 && seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
                           static_cast<std::size_t>(status.st_size) == total;
        std::byte* const at = sound ? detail::map_memfd(one.descriptor, total, false) : nullptr;
        if (!sound)
            note(2, "the memory that came is not as it was offered", 0);
        else if (at == nullptr && errno == ENOMEM)
            note(1, detail::concat({detail::memfd_mib(total), " MiB of address space for another rank's"}).c_str(),
                 ENOMEM);
        else if (at == nullptr)
            note(2, "mmap", errno);
        ::close(std::exchange(one.descriptor, -1));
        if (at == nullptr) return nullptr;
        std::shared_ptr<std::byte> memory = detail::own_mapping(at, total);
        std::array<std::uint64_t, 2> within{};
        std::memcpy(within.data(), at, sizeof within);
        return detail::same_secret(within, one.secret) ? memory : nullptr;
    }
    return nullptr;
} catch (std::bad_alloc const&) {
    return nullptr;
}

[[gnu::cold]] DDP_DECL bool memfd_sharing::keep(std::size_t bytes) noexcept {
    std::size_t const total = detail::memfd_bytes(bytes - header_bytes);
    void* const copy = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return false;
    bool room = true;
    try {  // no call refuses pages of a copy either
        detail::memory_limits const limits;
        // The header last: it says whether another rank has begun to write what was copied before.
        for (std::size_t done = header_bytes; done < total && room;) {
            detail::memory_limits::room const left = limits.left();
            room = detail::memory_limits::fits(left, total - done);
            std::size_t const step = detail::memory_limits::step(left, total - done);
            if (room) std::memcpy(static_cast<std::byte*>(copy) + done, own_ + done, step);
            done += step;
        }
    } catch (std::bad_alloc const&) {
        room = false;
    }
    __sync_synchronize();
    if (room) std::memcpy(copy, own_, header_bytes);
    if (room && ::mremap(copy, total, total, MREMAP_MAYMOVE | MREMAP_FIXED, own_) != MAP_FAILED) return true;
    ::munmap(copy, total);
    return false;
}

}  // namespace ddp
