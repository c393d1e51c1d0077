/// \file
/// What checkpoint/reader.hpp declares.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/checkpoint/reader.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/safetensors_header.hpp>
#include <ddp/data/source.hpp>

namespace ddp::detail {

/// A name as part of a key: characters that have a meaning there are escaped.
[[nodiscard, gnu::cold]] inline std::string escaped(std::string_view name) {
    constexpr std::string_view hex = "0123456789ABCDEF";
    std::string text;
    for (char const c : name) {
        auto const code = static_cast<unsigned char>(c);
        if (code >= 0x20 && c != '%' && c != '/' && c != '[' && c != ']')
            text += c;
        else
            ((text += '%') += hex[code >> 4]) += hex[code & 15];
    }
    return text;
}

[[gnu::cold]] DDP_DECL std::string state_key(state_slice const& slice) {
    if (slice.per_rank && slice.name.empty()) return concat({rank_buffer_prefix, escaped(slice.of)});
    return concat({slice.per_rank   ? rank_state_prefix
                   : slice.optional ? optional_prefix
                                    : state_prefix,
                   escaped(slice.of), "/", escaped(slice.name)});
}
[[gnu::cold]] DDP_DECL std::string state_tensor_name(state_slice const& slice) {
    return concat({state_key(slice), "[", slice.begin, ":", slice.begin + slice.count(), "]"});
}
[[gnu::cold]] DDP_DECL std::string extents_text(std::span<std::size_t const> shape) {
    std::string text;
    for (std::size_t const extent : shape) text += concat({text.empty() ? "" : " ", extent});
    return text;
}
[[gnu::cold]] DDP_DECL std::string state_line(state_slice const& slice) {
    return concat({state_key(slice), "\t", type_and_extents(slice.type, extents_text(slice.shape))});
}

[[gnu::cold]] DDP_DECL checkpoint_reader::checkpoint_reader(checkpoint_directory const& in, std::string const& name,
                                                            int rank, int ranks)
    : path_(in.of(name)), manifest_(in.manifest_of(name, digest_, rank)), files_(manifest_.shards.size()) {
    for (std::size_t s = 0; s < manifest_.shards.size(); ++s) {
        checkpoint_shard const& said = manifest_.shards[s];
        expect_there(shard_path(s), rank);
        std::uint64_t const bytes = file_source(shard_path(s)).size();
        if (bytes != said.bytes)
            throw data_error(errc::format,
                             concat({shard_path(s), ": has ", bytes, " bytes, the manifest says ", said.bytes}));
        if (s % static_cast<std::size_t>(ranks) == static_cast<std::size_t>(rank) &&
            digest_of_file(shard_path(s)) != said.digest)
            throw data_error(errc::format, shard_path(s) + ": is damaged: its digest is not that of the manifest");
        list_shard(s);
    }
    std::sort(state_.begin(), state_.end(), [](piece const& a, piece const& b) {
        return std::tie(a.key, a.begin, a.shard) < std::tie(b.key, b.begin, b.shard);
    });
}

[[gnu::cold]] DDP_DECL void checkpoint_reader::list_shard(std::size_t s) {
    safetensors_file const file(shard_path(s));
    for (std::size_t i = 0; i < file.tensors().size(); ++i) {
        tensor_info const& t = file.tensors()[i];
        if (s == 0 && t.name.starts_with(model_prefix)) {
            model_.push_back(t);
            model_.back().name.erase(0, model_prefix.size());
            model_at_.push_back(i);
            continue;
        }
        std::size_t const range = t.name.rfind('['), colon = t.name.rfind(':');
        piece one{t.name.substr(0, range), t.type, {}, 0, 0, s, i};
        std::size_t end = 0;
        auto const number = [&](std::size_t from, std::size_t to, std::size_t& value) {
            char const* const last = t.name.data() + to;
            auto const [at, what] = std::from_chars(t.name.data() + from, last, value);
            return what == std::errc() && at == last;
        };
        bool const named = (one.key.starts_with(state_prefix) || one.key.starts_with(rank_state_prefix) ||
                            one.key.starts_with(rank_buffer_prefix) || one.key.starts_with(optional_prefix)) &&
                           range != std::string::npos && colon != std::string::npos && range < colon &&
                           t.name.ends_with(']') && number(range + 1, colon, one.begin) &&
                           number(colon + 1, t.name.size() - 1, end) && one.begin <= end &&
                           file.metadata().contains(one.key);
        one.count = end - one.begin;
        if (!named || one.count != (t.end - t.begin) * 8 / bits_of(t.type))
            throw data_error(errc::format,
                             shard_path(s) + ": tensor " + in_quotes(t.name) + " does not belong in a checkpoint");
        one.shape = file.metadata().at(one.key);
        state_.push_back(std::move(one));
    }
}

[[gnu::cold]] DDP_DECL bool checkpoint_reader::has_rank_state() const noexcept {
    return std::any_of(state_.begin(), state_.end(),
                       [](piece const& p) { return p.key.starts_with(rank_state_prefix); });
}
[[gnu::cold]] DDP_DECL bool checkpoint_reader::has_rank_buffers() const noexcept {
    return std::any_of(state_.begin(), state_.end(),
                       [](piece const& p) { return p.key.starts_with(rank_buffer_prefix); });
}
[[gnu::cold]] DDP_DECL std::string checkpoint_reader::shard_path(std::size_t s) const {
    return path_ + "/" + shard_name(manifest_.shards[s].rank, manifest_.ranks);
}

[[gnu::cold]] DDP_DECL std::string checkpoint_reader::other_frozen(names_and_texts const& here,
                                                                   names_and_texts const& there,
                                                                   std::vector<std::string_view> const& apart) const {
    auto const has = [](names_and_texts const& state, std::string_view parameter) {
        std::string const tail = escaped(parameter) + "/";
        return std::any_of(state.begin(), state.end(), [&](auto const& entry) {
            std::string_view key = entry.first;
            key.remove_prefix(key.starts_with(rank_state_prefix) ? rank_state_prefix.size() : state_prefix.size());
            return key.starts_with(tail);
        });
    };
    std::vector<std::string_view> in_checkpoint, in_this_one;
    for (std::string_view const name : apart)
        if (has(here, name)) in_this_one.push_back(name);
    if (manifest_.settings) {
        auto const& frozen = manifest_.settings->frozen;
        // If trained parameters have no state either, the optimizer was another one.
        bool const rest_has_state = std::all_of(model_.begin(), model_.end(), [&](tensor_info const& t) {
            return !has(there, t.name) || has(here, t.name) ||
                   std::find(frozen.begin(), frozen.end(), t.name) != frozen.end();
        });
        for (std::string const& name : frozen)
            if (rest_has_state && !has(here, name) && has(there, name)) in_checkpoint.push_back(name);
    }
    std::string text;
    auto const add = [&](std::vector<std::string_view> const& names, char const* where) {
        constexpr std::size_t shown = 3;
        if (names.empty()) return;
        text += text.empty() ? "\n  " : ", ";
        for (std::size_t i = 0; i < std::min(shown, names.size()); ++i)
            text += concat({i == 0 ? "" : ", ", in_quotes(names[i])});
        if (names.size() > shown) text += concat({" and ", names.size() - shown, " more"});
        text += where;
    };
    add(in_checkpoint, " in the checkpoint only");
    add(in_this_one, " in this one only");
    if (text.empty()) return text;
    return text +
           ": frozen by local_options::frozen, and such a parameter has no state. Make the trainer with the "
           "local_options::frozen that the checkpoint's had; others can be frozen and unfrozen after resume, by "
           "freeze() and unfreeze()";
}

[[gnu::cold]] DDP_DECL void checkpoint_reader::expect_like(std::vector<kept_tensor> const& model,
                                                           std::vector<std::string> const& lines,
                                                           sampler const* batches, training_identity const& own,
                                                           std::vector<std::string_view> const* apart) const {
    constexpr std::size_t shown = 1000;
    std::size_t differences = 0;
    bool other_model = false, of_exchange = false, of_ranks = false;
    std::string text = path_ + ": is a checkpoint of another training:";
    auto const differs = [&](std::string_view what, std::string_view name, std::string const& here,
                             std::string const& there) {
        if (what == "state") {
            of_exchange = of_exchange || name.starts_with(rank_state_prefix) || name.starts_with("state/exchange/") ||
                          name.ends_with("/residual_of_mean") || name.starts_with(optional_prefix);
            of_ranks = of_ranks || name.starts_with(state_prefix);  // all have it: in a local_parallel the strategy's
        }
        if (++differences > shown) return;
        text += concat({"\n  ", what, " ", in_quotes(name), ": ", here.empty() ? "not " : here + " ",
                        "in the checkpoint, ", there.empty() ? "not " : there + " ", "in this one"});
    };
    // Two lists, by name: of each what it says.
    using list = names_and_texts;
    auto const compare = [&](std::string_view what, list here, list there) {
        std::sort(here.begin(), here.end());
        here.erase(std::unique(here.begin(), here.end()), here.end());
        std::sort(there.begin(), there.end());
        auto a = here.begin(), b = there.begin();
        while (a != here.end() || b != there.end()) {
            if (b == there.end() || (a != here.end() && a->first < b->first)) {
                differs(what, a->first, a->second, {});
                ++a;
            } else if (a == here.end() || b->first < a->first) {
                differs(what, b->first, {}, b->second);
                ++b;
            } else {
                if (a->second != b->second) differs(what, a->first, a->second, b->second);
                ++a, ++b;
            }
        }
    };
    list here, there;
    for (tensor_info const& t : model_) here.emplace_back(t.name, type_and_shape(t.type, t.shape));
    for (kept_tensor const& t : model) there.emplace_back(t.name, type_and_shape(t.type, t.shape));
    compare("tensor", std::exchange(here, {}), std::exchange(there, {}));
    bool const same_tensors = differences == 0;
    for (piece const& p : state_)
        if (!p.key.starts_with(rank_buffer_prefix)) here.emplace_back(p.key, type_and_extents(p.type, p.shape));
    for (std::string const& line : lines) {
        std::size_t const tab = line.find('\t');
        there.emplace_back(line.substr(0, tab), line.substr(tab + 1));
    }
    std::string const frozen_apart = apart == nullptr ? std::string() : other_frozen(here, there, *apart);
    auto const has = [](list const& state, std::string_view key) {
        return std::any_of(state.begin(), state.end(), [&](auto const& entry) { return entry.first == key; });
    };
    bool const was_local = has(here, "state/local/meetings"), is_local = has(there, "state/local/meetings");
    auto const may_miss = [](auto const& entry) { return entry.first.starts_with(optional_prefix); };
    if (std::any_of(here.begin(), here.end(), may_miss) && std::any_of(there.begin(), there.end(), may_miss)) {
        list const all = here;
        std::erase_if(here, [&](auto const& entry) { return may_miss(entry) && !has(there, entry.first); });
        std::erase_if(there, [&](auto const& entry) { return may_miss(entry) && !has(all, entry.first); });
    }
    compare("state", std::exchange(here, {}), std::exchange(there, {}));
    if (manifest_.identity) {
        training_identity const& was = *manifest_.identity;
        bool const same_form = was.optimizers.contains("*") == own.optimizers.contains("*");
        auto const names = [&](string_map const& optimizers) {
            if (same_form || !optimizers.contains("*")) return list(optimizers.begin(), optimizers.end());
            list all;  // by parameter, as the other one
            for (kept_tensor const& t : model)
                if (was.optimizers.contains(t.name) || own.optimizers.contains(t.name))
                    all.emplace_back(t.name, optimizers.at("*"));
            return all;
        };
        if (!was.optimizers.empty() && !own.optimizers.empty())
            compare("optimizer of", names(was.optimizers), names(own.optimizers));
        auto const hash = [](std::uint64_t value) { return value == 0 ? std::string("none") : hexadecimal(value); };
        other_model = was.model_hash != own.model_hash;
        compare("model's", {{"hash()", hash(was.model_hash)}}, {{"hash()", hash(own.model_hash)}});
    }
    if (batches != nullptr) {
        bool const known = manifest_.sampler && manifest_.sampler->list;
        // A sampler that has not passed through the loader does not know how samples are prepared.
        bool const prepared = manifest_.sampler && manifest_.sampler->prepared && batches->digest_of_preparation() != 0;
        auto const options = [known, prepared](sampler_options const& o, std::optional<std::uint64_t> digest_of_list,
                                               std::optional<std::uint64_t> preparation) {
            list all{{"samples", concat({o.samples})},
                     {"global_batch", concat({o.global_batch})},
                     {"seed", concat({o.seed})},
                     {"shuffle", o.shuffle ? "true" : "false"},
                     {"drop_last", o.drop_last ? "true" : "false"}};
            if (known)
                all.emplace_back("list", *digest_of_list == 0 ? "none" : "with digest " + hexadecimal(*digest_of_list));
            if (prepared)
                all.emplace_back("preparation (normalisation, augmentation)",
                                 "with digest " + hexadecimal(*preparation));
            return all;
        };
        compare("sampler's",
                manifest_.sampler
                    ? options(manifest_.sampler->options, manifest_.sampler->list, manifest_.sampler->prepared)
                    : list{},
                options(batches->options(), batches->digest_of_list(), batches->digest_of_preparation()));
        if (differences == 0 && manifest_.sampler &&
            (manifest_.sampler->position > batches->steps_per_epoch() || manifest_.sampler->epoch >> 48 != 0))
            throw data_error(errc::format, path_ + ": the sampler's position is past the end of an epoch");
    }
    if (differences == 0) return;
    if (differences > shown) text += concat({"\n  and ", differences - shown, " more"});
    if (was_local != is_local)
        text += was_local ? "\n  it was written by a local_parallel, and this trainer is not one"
                          : "\n  it was not written by a local_parallel, and this trainer is one";
    else if (same_tensors && !was_local && of_exchange)
        text += "\n  it was written with another exchange, or one with other options that its state depends on";
    else if (same_tensors && was_local && of_ranks && frozen_apart.empty())
        text += "\n  it was written with another strategy";
    if (text.find("\n  sampler's 'preparation") != text.npos)
        text +=
            "\n  to continue with another preparation of samples, give resume a sampler of your own instead of the "
            "loader's place()";
    if (other_model)
        text +=
            "\n  hash() of a model covers what is in no tensor, such as the seed of dropout and the settings of "
            "layers: build and initialize the model as the checkpoint's was";
    text += frozen_apart;
    throw data_error(errc::format, text);
}

DDP_DECL std::span<checkpoint_reader::piece const> checkpoint_reader::pieces_of(std::string_view key) const noexcept {
    auto const first = std::lower_bound(state_.begin(), state_.end(), key,
                                        [](piece const& p, std::string_view k) { return p.key < k; });
    auto const last =
        std::upper_bound(first, state_.end(), key, [](std::string_view k, piece const& p) { return k < p.key; });
    return {first, last};
}

template <class F>
std::size_t checkpoint_reader::cover(state_slice const& slice, int rank, F&& f) const {
    std::span<piece const> const all = pieces_of(state_key(slice));
    std::size_t at = slice.begin;
    std::size_t const end = slice.begin + slice.count();
    for (piece const& p : all) {
        if (at == end || p.begin > at) break;
        if (slice.per_rank && manifest_.shards[p.shard].rank != rank) continue;
        std::size_t const to = std::min(end, p.begin + p.count);
        if (to <= at) continue;
        f(p, at, to);
        at = to;
    }
    return at;
}

[[gnu::cold]] DDP_DECL void checkpoint_reader::expect_covered(state_slice const& slice, int rank) const {
    std::size_t const reached = cover(slice, rank, [](piece const&, std::size_t, std::size_t) {});
    if (reached != slice.begin + slice.count())
        throw data_error(errc::format, concat({path_, ": element ", reached, " of ", in_quotes(state_key(slice)),
                                               " is in none of its files"}));
}

[[gnu::cold]] DDP_DECL bool checkpoint_reader::has(state_slice const& slice, int rank) const {
    bool alike = true;
    std::size_t const reached =
        cover(slice, rank, [&](piece const& p, std::size_t, std::size_t) { alike = alike && p.type == slice.type; });
    return alike && reached == slice.begin + slice.count();
}

[[gnu::cold]] DDP_DECL std::vector<std::uint8_t> checkpoint_reader::frozen_among(
    std::span<std::string_view const> parameters) const {
    std::vector<std::uint8_t> marks(parameters.size());
    if (!manifest_.settings) return marks;
    std::vector<std::string_view> names(parameters.begin(), parameters.end()),
        left(manifest_.settings->frozen.begin(), manifest_.settings->frozen.end());
    std::sort(names.begin(), names.end());
    std::sort(left.begin(), left.end());
    for (std::string_view const name : left)
        if (!std::binary_search(names.begin(), names.end(), name))
            throw data_error(errc::format, concat({path_, ": lists frozen parameter ", in_quotes(name),
                                                   ", which the model does not have"}));
    for (std::size_t i = 0; i < marks.size(); ++i)
        marks[i] = std::binary_search(left.begin(), left.end(), parameters[i]) ? 1 : 0;
    return marks;
}
[[gnu::cold]] DDP_DECL void checkpoint_reader::expect_settings_for(bool rates, bool freezes) const {
    if (!manifest_.settings ||
        ((rates || manifest_.settings->rate_factor == 1) && (freezes || manifest_.settings->frozen.empty())))
        return;
    throw data_error(errc::format,
                     concat({path_,
                             ": has frozen parameters, or a factor of the learning rate, which this trainer "
                             "cannot have; continue with data_parallel"}));
}

DDP_DECL safetensors_file const& checkpoint_reader::open(std::size_t s) {
    constexpr std::size_t most = 64;  // descriptors
    if (!files_[s]) {
        if (open_ == most) {
            for (auto& file : files_) file.reset();
            open_ = 0;
        }
        files_[s].emplace(shard_path(s));
        ++open_;
    }
    return *files_[s];
}
/// Finds a tensor of a file again; throws data_error if the file was overwritten since it was listed.
[[nodiscard, gnu::cold]] inline tensor_info const& again(safetensors_file const& file, std::size_t tensor,
                                                         std::uint64_t bytes) {
    if (tensor >= file.tensors().size() || file.tensors()[tensor].end - file.tensors()[tensor].begin != bytes)
        throw data_error(errc::file, file.name() + ": was overwritten while it was read");
    return file.tensors()[tensor];
}

[[gnu::cold]] DDP_DECL std::uint64_t checkpoint_reader::read_model(std::vector<kept_tensor> const& model) {
    digest all;
    std::vector<std::byte> aside;
    safetensors_file const& file = open(0);
    for (std::size_t i = 0; i < model_.size(); ++i) {
        auto const own =
            std::find_if(model.begin(), model.end(), [&](auto const& t) { return t.name == model_[i].name; });
        DDP_EXPECTS(own != model.end(), "checkpoint_reader::read_model comes after expect_like");
        read_kept(file, again(file, model_at_[i], own->bytes.size()), *own, true, aside, all);
    }
    return all.value();
}

DDP_DECL void checkpoint_reader::read_state(state_slice const& slice, int rank) {
    std::size_t const bits = bits_of(slice.type);
    (void)cover(slice, rank, [&](piece const& p, std::size_t from, std::size_t to) {
        safetensors_file const& file = open(p.shard);
        file.read(again(file, p.tensor, p.count * bits / 8), (from - p.begin) * bits / 8,
                  slice.bytes.subspan((from - slice.begin) * bits / 8, (to - from) * bits / 8));
    });
}

}  // namespace ddp::detail
