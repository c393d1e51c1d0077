/// \file
/// secret_in_a_file: a job's secret, where ranks look for it.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ddp::test {

/// A secret in a file of its own, named by DDP_SECRET_FILE.
struct secret_in_a_file {
    std::string path = "/tmp/ddp_secret_XXXXXX";
    explicit secret_in_a_file(std::string const& secret) {
        int const fd = ::mkstemp(path.data());
        if (::write(fd, secret.data(), secret.size()) != static_cast<ssize_t>(secret.size()))
            throw std::runtime_error("no file");
        ::close(fd);
        ::setenv("DDP_SECRET_FILE", path.c_str(), 1);
    }
    secret_in_a_file(secret_in_a_file const&) = delete;
    secret_in_a_file& operator=(secret_in_a_file const&) = delete;
    ~secret_in_a_file() {
        ::unsetenv("DDP_SECRET_FILE");
        ::unlink(path.c_str());
    }
};

}  // namespace ddp::test
