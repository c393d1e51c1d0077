/// \file
/// checkpoint_manifest: the description of a checkpoint, as JSON that ends in its own digest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/separate.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/data/string_map.hpp>
#include <ddp/train/training_progress.hpp>

namespace ddp::detail {

/// The file of a rank.
struct checkpoint_shard {
    int rank = 0;
    std::uint64_t bytes = 0;
    std::uint64_t digest = 0;  // of the file, see digest_of_file
};

/// A sampler that is to be continued.
struct sampler_place {
    sampler_options options;
    std::uint64_t epoch = 0;
    std::size_t position = 0;
    std::optional<std::uint64_t> list = std::nullopt;      // sampler::digest_of_list(); none before version 3
    std::optional<std::uint64_t> prepared = std::nullopt;  // digest_of_preparation(), unless 0; none before version 4
};

/// What identifies the training but is in no tensor.
struct training_identity {
    std::uint64_t model_hash = 0;  // hash() of the model; 0: it has none
    string_map optimizers;         // the algorithm's name by parameter, or that of all as "*"; none if it is not known
};

/// Settings that a program has made between steps, and that later bits depend on.
struct trainer_settings {
    double rate_factor = 1;
    std::vector<std::string> frozen;  // parameters, in the model's order
};

struct checkpoint_manifest {
    std::string library;  // the version that wrote it
    std::uint64_t step = 0;
    int ranks = 0;
    std::vector<checkpoint_shard> shards;       // by rank; ranks that have nothing to keep write none
    std::optional<training_identity> identity;  // none before version 3
    /// Its completed_steps is `step`. None for trainers that do not keep it, and before version 3.
    std::optional<training_progress> progress;
    std::optional<trainer_settings> settings;  // none for trainers without settings, and before version 2
    string_map words;                          // data_parallel::settings_in_words(); none before version 4
    std::optional<sampler_place> sampler;
    string_map entries;  // the user's
};

/// "shard-00002-of-00004.safetensors".
[[nodiscard]] std::string shard_name(int rank, int ranks);

/// Texts must be UTF-8. The same manifest gives the same text.
[[nodiscard]] std::string manifest_text(checkpoint_manifest const& manifest);

/// Strict: members in the order of manifest_text, nothing unknown, the digest right. Pure.
/// Throws data_error (errc::format), naming `file`, the position and what was expected.
[[nodiscard]] checkpoint_manifest parse_manifest(std::string_view text, std::string const& file);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/checkpoint/impl/manifest.ipp>
#endif
