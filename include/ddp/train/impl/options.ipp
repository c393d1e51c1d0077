/// \file
/// What train/options.hpp declares.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include <ddp/core/text.hpp>
#include <ddp/data/string_map.hpp>
#include <ddp/train/options.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL std::array<std::string, 8> training_options::hash_words() const {
    constexpr char const* updates[] = {"replicated", "sharded", "automatic"};
    constexpr char const* buffer_policies[] = {"from_rank_0", "averaged", "left_alone", "from_rank_0_at_evaluation"};
    constexpr char const* guards[] = {"unchecked", "stop", "skip", "warn"};
    std::string clipped = "none";
    if (norm_clip() != nullptr) clipped = "clip_by_global_norm " + detail::decimal(norm_clip()->max_norm);
    if (value_clip() != nullptr) clipped = "clip_by_value " + detail::decimal(value_clip()->limit);
    std::string unused_and_frozen = unused == ddp::unused::allowed ? "unused::allowed" : "unused::error";
    if (frozen.empty()) unused_and_frozen += ", nothing frozen";
    for (std::string const& pattern : frozen) unused_and_frozen += ", frozen " + detail::in_quotes(pattern);
    return {std::string(updates[static_cast<std::size_t>(update)]) + (overlap_gather ? " with overlap_gather" : ""),
            clipped,
            schedule.hash_words(),
            unused_and_frozen,
            std::to_string(buckets_in_flight),
            guards[static_cast<std::size_t>(nonfinite)],
            std::to_string(agreement_steps),
            buffer_policies[static_cast<std::size_t>(buffers)]};
}

[[gnu::cold]] DDP_DECL string_map training_options::settings_in_words() const {
    std::array<std::string, 8> const words = hash_words();
    string_map all;
    for (std::size_t i = 0; i < words.size(); ++i)
        if (hash_names[i] == "clip" || hash_names[i] == "schedule" || hash_names[i] == "nonfinite" ||
            hash_names[i] == "buffers")
            all.emplace(std::string(hash_names[i]), words[i]);
    return all;
}

}  // namespace ddp
