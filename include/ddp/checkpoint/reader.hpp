/// \file
/// checkpoint_reader: one checkpoint, checked, whose state is read by the elements that a rank needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/checkpoint/directory.hpp>
#include <ddp/checkpoint/manifest.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/data/safetensors.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/model/state_slice.hpp>
#include <ddp/train/weights_file.hpp>

namespace ddp::detail {

/// What the names of tensors of a shard begin with.
inline constexpr std::string_view model_prefix = "model/", state_prefix = "state/", rank_state_prefix = "rank_state/",
                                  rank_buffer_prefix = "rank_buffer/";

/// Under which name a piece of state is kept: "state/w1/momentum", or "rank_state/…" where each rank has another; without a
/// slot's name it is a buffer of which each rank has another: "rank_buffer/1.running_mean".
[[nodiscard]] std::string state_key(state_slice const& slice);
/// Of the tensor that holds it: "state/w1/momentum[0:512]".
[[nodiscard]] std::string state_tensor_name(state_slice const& slice);
/// Key, element type and whole shape on one line: what a trainer and a checkpoint must have alike.
[[nodiscard]] std::string state_line(state_slice const& slice);
/// The whole's shape, as a shard's metadata say it: "512 784".
[[nodiscard]] std::string extents_text(std::span<std::size_t const> shape);

/// Throws  data_error: errc::file if a file is missing or cannot be read, errc::format if the manifest, a digest or a
///         header is wrong.
/// Cost    of making one: the headers of all shards; the digests of every ranks-th shard, from `rank` on.
class checkpoint_reader {
public:
    checkpoint_reader(checkpoint_directory const& in, std::string const& name, int rank, int ranks);

    [[nodiscard]] std::string const& path() const noexcept { return path_; }
    [[nodiscard]] checkpoint_manifest const& manifest() const noexcept { return manifest_; }
    /// Of the manifest's text.
    [[nodiscard]] std::uint64_t digest_of_manifest() const noexcept { return digest_; }
    /// Whether a rank of it has state that other ranks have not; whether it has such buffers.
    [[nodiscard]] bool has_rank_state() const noexcept;
    [[nodiscard]] bool has_rank_buffers() const noexcept;

    /// Throws data_error (errc::format), with all differences, unless this is a checkpoint of such a model, of the state that
    /// `lines` (sorted; state_line, of all ranks) tells of, of such a sampler, if there is one, and of this identity. `apart`:
    /// parameters that are frozen from the start here, of a trainer that keeps no state of those; null for others.
    void expect_like(std::vector<kept_tensor> const& model, std::vector<std::string> const& lines,
                     sampler const* batches, training_identity const& own,
                     std::vector<std::string_view> const* apart = nullptr) const;
    /// Whether it has this slice for rank `rank`.
    [[nodiscard]] bool has(state_slice const& slice, int rank) const;
    /// Throws data_error unless all elements of this slice are in the checkpoint.
    void expect_covered(state_slice const& slice, int rank) const;

    /// By parameter: 1 where the checkpoint says that it is frozen. Throws data_error (errc::format) if it names one that is
    /// not among them.
    [[nodiscard]] std::vector<std::uint8_t> frozen_among(std::span<std::string_view const> parameters) const;
    /// Throws data_error (errc::format) if trainer_settings say anything that the trainer cannot have: `rates`, a factor of the
    /// learning rate; `freezes`, parameters that are frozen.
    void expect_settings_for(bool rates, bool freezes) const;

    /// Reads parameters and buffers into their places and says what they were.
    [[nodiscard]] std::uint64_t read_model(std::vector<kept_tensor> const& model);
    /// Reads a slice of the state, that of rank `rank` where each has another.
    void read_state(state_slice const& slice, int rank);

private:
    struct piece {
        std::string key;
        element_type type;
        std::string shape;
        std::size_t begin, count;  // elements of the whole
        std::size_t shard, tensor;
    };

    using names_and_texts = std::vector<std::pair<std::string, std::string>>;

    void list_shard(std::size_t s);
    /// In words, which parameters have state in one of these lists only because local_options::frozen differs.
    [[nodiscard]] std::string other_frozen(names_and_texts const& here, names_and_texts const& there,
                                           std::vector<std::string_view> const& apart) const;
    [[nodiscard]] std::span<piece const> pieces_of(std::string_view key) const noexcept;
    /// Calls f(piece, from, to) for pieces that cover the slice's elements, in order. Says how far it came.
    template <class F>
    std::size_t cover(state_slice const& slice, int rank, F&& f) const;
    [[nodiscard]] std::string shard_path(std::size_t s) const;
    safetensors_file const& open(std::size_t s);

    std::string path_;
    checkpoint_manifest manifest_;
    std::uint64_t digest_ = 0;
    std::vector<tensor_info> model_;     // of shard 0, names without "model/"
    std::vector<std::size_t> model_at_;  // model_[i]: tensor number …
    std::vector<piece> state_;           // by key, then begin
    std::vector<std::optional<safetensors_file>> files_;
    std::size_t open_ = 0;
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/checkpoint/impl/reader.ipp>
#endif
