/// \file
/// checkpoint_reader: one verified checkpoint, of whose state a rank reads the elements that it needs.
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
#include <ddp/core/element_type.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/safetensors.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/model/state_slice.hpp>
#include <ddp/train/weights_file.hpp>

namespace ddp::detail {

/// Prefixes of the names of tensors in a shard.
inline constexpr std::string_view model_prefix = "model/", state_prefix = "state/", rank_state_prefix = "rank_state/",
                                  rank_buffer_prefix = "rank_buffer/", optional_prefix = "optional_state/";

/// The name under which a piece of state is kept: "state/w1/momentum", "rank_state/…" if it differs between ranks, or
/// "optional_state/…" if it may be missing;
/// without a slot's name it is a buffer that differs between ranks: "rank_buffer/1.running_mean".
[[nodiscard]] std::string state_key(state_slice const& slice);
/// The name of the tensor that holds it: "state/w1/momentum[0:512]".
[[nodiscard]] std::string state_tensor_name(state_slice const& slice);
/// Key, element type and whole shape on one line: these must be the same in a trainer and a checkpoint.
[[nodiscard]] std::string state_line(state_slice const& slice);
/// The shape of the whole state, as in a shard's metadata: "512 784".
[[nodiscard]] std::string extents_text(std::span<std::size_t const> shape);
/// For messages, of such a text: "F32 [512 x 784]".
[[gnu::cold]] [[nodiscard]] inline std::string type_and_extents(element_type type, std::string_view extents) {
    std::string text = concat({name_of(type), " ["});
    for (char const c : extents) text += c == ' ' ? std::string_view(" x ") : std::string_view(&c, 1);
    return text + "]";
}

/// Throws  data_error: errc::file if a file is missing or cannot be read, errc::format if the manifest, a digest or a
///         header is wrong.
/// Cost    of making one: the headers of all shards; the digests of every ranks-th shard, from `rank` on.
class checkpoint_reader {
public:
    checkpoint_reader(checkpoint_directory const& in, std::string const& name, int rank, int ranks);

    [[nodiscard]] std::string const& path() const noexcept { return path_; }
    [[nodiscard]] checkpoint_manifest const& manifest() const noexcept { return manifest_; }
    /// The digest of the manifest's text.
    [[nodiscard]] std::uint64_t digest_of_manifest() const noexcept { return digest_; }
    /// Whether the checkpoint has state that differs between ranks; whether it has such buffers.
    [[nodiscard]] bool has_rank_state() const noexcept;
    [[nodiscard]] bool has_rank_buffers() const noexcept;

    /// Throws data_error (errc::format), with all differences, unless this is a checkpoint of such a model, of the
    /// state that `lines` describes (sorted; state_line, of all ranks), of such a sampler, if there is one, and of this
    /// identity. `apart`: the parameters that are frozen from the start here, for a trainer that keeps no state of
    /// those; null for other trainers.
    void expect_like(std::vector<kept_tensor> const& model, std::vector<std::string> const& lines,
                     sampler const* batches, training_identity const& own,
                     std::vector<std::string_view> const* apart = nullptr) const;
    /// Whether the checkpoint has this slice for rank `rank`.
    [[nodiscard]] bool has(state_slice const& slice, int rank) const;
    /// Throws data_error unless all elements of this slice are in the checkpoint.
    void expect_covered(state_slice const& slice, int rank) const;

    /// By parameter: 1 if the checkpoint lists it as frozen. Throws data_error (errc::format) if it names one that is
    /// not among them.
    [[nodiscard]] std::vector<std::uint8_t> frozen_among(std::span<std::string_view const> parameters) const;
    /// Throws data_error (errc::format) if trainer_settings contain something that the trainer cannot have. `rates`: it
    /// can have a factor of the learning rate; `freezes`: it can have frozen parameters.
    void expect_settings_for(bool rates, bool freezes) const;

    /// Reads parameters and buffers into the model, and returns their digest.
    [[nodiscard]] std::uint64_t read_model(std::vector<kept_tensor> const& model);
    /// Reads a slice of the state: that of rank `rank` if it differs between ranks.
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
    /// Text that names the parameters that have state in only one of these lists because local_options::frozen differs.
    [[nodiscard]] std::string other_frozen(names_and_texts const& here, names_and_texts const& there,
                                           std::vector<std::string_view> const& apart) const;
    [[nodiscard]] std::span<piece const> pieces_of(std::string_view key) const noexcept;
    /// Calls f(piece, from, to) for pieces that cover the slice's elements, in order. Returns the first element not
    /// covered.
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
