/// \file
/// whole_file: a file that is written whole or not at all.
#pragma once

#include <string>

#include <ddp/core/bytes.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// Writes a temporary file next to `path`; commit() renames it to `path` in one step. A program that opens `path`
/// meanwhile, or after a crash, finds the old file or the new one. Without commit() the destructor removes the
/// temporary file; only a killed process leaves it behind, as `path.<pid>.<number>.tmp`.
///
/// Throws  data_error (errc::file) with the system's reason: directory missing, no space, no permission, or `path`
///         exists and is not a regular file. A symbolic link at `path` is replaced, not followed.
/// Source  the order of fsync and rename: Pillai et al., "All file systems are not created equal", OSDI 2014.
class whole_file {
public:
    explicit whole_file(std::string path);
    whole_file(whole_file const&) = delete;
    whole_file& operator=(whole_file const&) = delete;
    ~whole_file();

    void write(const_bytes bytes);

    /// Call it once. Returns when data and name are on the disk.
    void commit();

private:
    [[noreturn]] void fail(char const* what, int reason) const;

    std::string path_, temporary_;
    int descriptor_ = -1;
    std::size_t written_ = 0;
    bool committed_ = false;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/whole_file.ipp>
#endif
