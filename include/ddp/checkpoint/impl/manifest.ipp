/// \file
/// What checkpoint/manifest.hpp declares.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/checkpoint/manifest.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/text.hpp>
#include <ddp/core/version.hpp>
#include <ddp/data/json_reader.hpp>
#include <ddp/data/safetensors_header.hpp>

namespace ddp::detail {

/// The others are read: 1 had no settings of the trainer, 2 neither identity nor progress, nor the list of a sampler, 3 no
/// settings in words, nor how a loader prepares samples.
inline constexpr std::uint64_t manifest_format = 4;
inline constexpr std::uint64_t most_ranks_of_a_manifest = std::uint64_t{1} << 24;

[[nodiscard]] inline std::string hexadecimal(std::uint64_t value) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
    return text;
}

/// "0x1.8p-1", whatever the locale: every finite number that is not negative has one such text.
[[nodiscard]] inline std::string exact_text(double value) {
    char text[40];
    auto const [end, what] = std::to_chars(text, text + sizeof text, value, std::chars_format::hex);
    return "0x" + std::string(text, end);
}

/// The same for any number: "-0x1p+3", "inf", "nan".
[[nodiscard]] inline std::string exact_signed_text(double value) {
    if (std::isnan(value)) return "nan";
    std::string const size = std::isinf(value) ? "inf" : exact_text(std::fabs(value));
    return std::signbit(value) ? "-" + size : size;
}

[[gnu::cold]] DDP_DECL std::string shard_name(int rank, int ranks) {
    char text[64];
    std::snprintf(text, sizeof text, "shard-%05d-of-%05d.safetensors", rank, ranks);
    return text;
}

inline void append_strings(std::string& json, string_map const& all) {
    for (bool first = true; auto const& [name, text] : all) {
        json += std::exchange(first, false) ? "" : ", ";
        append_json_string(json, name);
        json += ": ";
        append_json_string(json, text);
    }
}

[[gnu::cold]] DDP_DECL std::string manifest_text(checkpoint_manifest const& manifest) {
    auto const word = [](bool value) { return value ? "true" : "false"; };
    std::string json =
        concat({"{\n  \"format\": \"ddp checkpoint\",\n  \"format_version\": ", manifest_format, ",\n  \"library\": "});
    append_json_string(json, manifest.library);
    json += concat({",\n  \"step\": ", manifest.step, ",\n  \"ranks\": ", manifest.ranks, ",\n  \"shards\": ["});
    for (checkpoint_shard const& s : manifest.shards)
        json +=
            concat({&s == manifest.shards.data() ? "" : ",", "\n    {\"file\": \"", shard_name(s.rank, manifest.ranks),
                    "\", \"bytes\": ", s.bytes, ", \"digest\": \"", hexadecimal(s.digest), "\"}"});
    json += "\n  ],\n";
    if (manifest.identity) {
        json += concat({"  \"model_hash\": \"", hexadecimal(manifest.identity->model_hash), "\",\n  \"optimizer\": {"});
        append_strings(json, manifest.identity->optimizers);
        json += "},\n";
    }
    if (manifest.progress) {
        training_progress const& at = *manifest.progress;
        json += concat({"  \"begun_steps\": ", at.begun_steps, ",\n  \"last_weight\": ", at.last_weight,
                        ",\n  \"last_losses\": \"", exact_signed_text(at.last_losses), "\",\n  \"previous_loss\": \"",
                        exact_signed_text(at.previous_loss), "\",\n"});
    }
    if (manifest.settings) {
        json += concat(
            {"  \"rate_factor\": \"", exact_text(std::fabs(manifest.settings->rate_factor)), "\",\n  \"frozen\": ["});
        for (bool first = true; std::string const& name : manifest.settings->frozen) {
            json += std::exchange(first, false) ? "" : ", ";
            append_json_string(json, name);
        }
        json += "],\n";
    }
    if (!manifest.words.empty()) {
        json += "  \"settings\": {";
        append_strings(json, manifest.words);
        json += "},\n";
    }
    if (manifest.sampler) {
        sampler_place const& at = *manifest.sampler;
        json += concat({"  \"sampler\": {\"epoch\": ", at.epoch, ", \"position\": ", at.position,
                        ", \"samples\": ", at.options.samples, ", \"global_batch\": ", at.options.global_batch,
                        ", \"seed\": ", at.options.seed, ", \"shuffle\": ", word(at.options.shuffle),
                        ", \"drop_last\": ", word(at.options.drop_last)});
        if (at.list) json += concat({", \"list\": \"", hexadecimal(*at.list), "\""});
        if (at.prepared) json += concat({", \"prepared\": \"", hexadecimal(*at.prepared), "\""});
        json += "},\n";
    }
    json += "  \"entries\": {";
    for (bool first = true; auto const& [key, text] : manifest.entries) {
        json += std::exchange(first, false) ? "\n    " : ",\n    ";
        append_json_string(json, key);
        json += ": ";
        append_json_string(json, text);
    }
    json += manifest.entries.empty() ? "},\n  " : "\n  },\n  ";
    std::uint64_t const sum = digest().add(json).value();
    return json + concat({"\"digest\": \"", hexadecimal(sum), "\"\n}\n"});
}

/// Reads only the form of JSON that a manifest has.
class manifest_parser {
public:
    manifest_parser(std::string_view text, std::string const& file) : text_(text), json_(text, file, "manifest") {}

    checkpoint_manifest parse() {
        checkpoint_manifest all;
        json_.expect('{');
        name("format");
        if (json_.string() != "ddp checkpoint") json_.fail("this is not a manifest of a checkpoint");
        next("format_version");
        std::uint64_t const version = json_.number();
        if (version == 0 || version > manifest_format)
            json_.fail(concat({"format_version is ", version, ", this library reads 1 to ", manifest_format}));
        next("library");
        all.library = json_.string();
        next("step");
        all.step = json_.number();
        next("ranks");
        std::uint64_t const ranks = json_.number();
        if (ranks == 0 || ranks > most_ranks_of_a_manifest) json_.fail(concat({"no job has ", ranks, " ranks"}));
        all.ranks = static_cast<int>(ranks);
        next("shards");
        for (bool more = json_.opens('[', ']'); more; more = json_.another(']')) shard(all);
        if (all.shards.empty() || all.shards.front().rank != 0) json_.fail("rank 0 has no shard");
        json_.expect(',');
        std::string key = json_.string();
        if (version >= 3 && key == "model_hash") {
            json_.expect(':');
            all.identity = identity();
            json_.expect(',');
            key = json_.string();
        }
        if (version >= 3 && key == "begun_steps") {
            json_.expect(':');
            all.progress = progress(all.step);
            json_.expect(',');
            key = json_.string();
        }
        if (version >= 2 && key == "rate_factor") {
            json_.expect(':');
            all.settings = settings();
            json_.expect(',');
            key = json_.string();
        }
        if (version >= 4 && key == "settings") {
            json_.expect(':');
            all.words = json_.strings("settings");
            json_.expect(',');
            key = json_.string();
        }
        if (key == "sampler") {
            json_.expect(':');
            all.sampler = sampler(version);
            json_.expect(',');
            key = json_.string();
        }
        if (key != "entries") json_.fail("expected 'entries', found " + in_quotes(key));
        json_.expect(':');
        all.entries = json_.strings("entries");
        json_.expect(',');
        (void)json_.peek();
        std::uint64_t const sum = digest().add(text_.substr(0, json_.position())).value();
        name("digest");
        if (hexadecimal(sum) != json_.string()) json_.fail("its digest does not match its contents: it is damaged");
        json_.expect('}');
        json_.expect_end("\n");
        return all;
    }

private:
    void name(std::string_view expected) {
        std::string const found = json_.string();
        if (found != expected) json_.fail(concat({"expected ", in_quotes(expected), ", found ", in_quotes(found)}));
        json_.expect(':');
    }
    void next(std::string_view expected) {
        json_.expect(',');
        name(expected);
    }
    void shard(checkpoint_manifest& all) {
        checkpoint_shard one;
        json_.expect('{');
        name("file");
        std::string const file = json_.string();
        int const least = all.shards.empty() ? 0 : all.shards.back().rank + 1;
        int rank = -1;
        if (constexpr std::string_view begin = "shard-"; file.starts_with(begin))
            std::from_chars(file.data() + begin.size(), file.data() + file.size(), rank);
        if (rank < least || rank >= all.ranks || shard_name(rank, all.ranks) != file)
            json_.fail(in_quotes(file) + " is not the shard that comes next");
        one.rank = rank;
        next("bytes");
        one.bytes = json_.number();
        next("digest");
        one.digest = hash();
        json_.expect('}');
        all.shards.push_back(one);
    }
    training_identity identity() {
        training_identity all{.model_hash = hash(), .optimizers = {}};
        next("optimizer");
        all.optimizers = json_.strings("optimizer");
        return all;
    }
    training_progress progress(std::uint64_t completed) {
        training_progress at{.completed_steps = completed, .begun_steps = json_.number()};
        next("last_weight");
        at.last_weight = json_.number();
        next("last_losses");
        at.last_losses = any_number();
        next("previous_loss");
        at.previous_loss = any_number();
        return at;
    }
    /// As exact_signed_text writes it.
    double any_number() {
        std::string const text = json_.string();
        std::string_view digits = text;
        bool const negative = digits.starts_with('-');
        if (negative) digits.remove_prefix(1);
        if (digits.starts_with("0x")) digits.remove_prefix(2);
        double value = 0;
        (void)std::from_chars(digits.data(), digits.data() + digits.size(), value, std::chars_format::hex);
        if (negative) value = -value;
        if (exact_signed_text(value) != text) json_.fail(in_quotes(text) + " is not a number such as '-0x1p-1'");
        return value;
    }
    trainer_settings settings() {
        trainer_settings all;
        std::string const text = json_.string();
        char const* const end = text.data() + text.size();
        bool const begins = text.starts_with("0x");
        auto const [at, what] =
            std::from_chars(text.data() + (begins ? 2 : 0), end, all.rate_factor, std::chars_format::hex);
        if (!begins || what != std::errc() || at != end || !std::isfinite(all.rate_factor) ||
            std::signbit(all.rate_factor) || exact_text(all.rate_factor) != text)
            json_.fail(in_quotes(text) + " is not a factor of the learning rate, such as '0x1p-1'");
        next("frozen");
        for (bool more = json_.opens('[', ']'); more; more = json_.another(']')) all.frozen.push_back(json_.string());
        return all;
    }
    sampler_place sampler(std::uint64_t version) {
        sampler_place at{};
        json_.expect('{');
        name("epoch");
        at.epoch = json_.number();
        next("position");
        at.position = json_.number();
        next("samples");
        at.options.samples = json_.number();
        next("global_batch");
        at.options.global_batch = json_.number();
        next("seed");
        at.options.seed = json_.number();
        next("shuffle");
        at.options.shuffle = json_.boolean();
        next("drop_last");
        at.options.drop_last = json_.boolean();
        std::string member;
        auto const another = [&] {
            if (json_.peek() != ',') return false;
            json_.expect(',');
            member = json_.string();
            json_.expect(':');
            return true;
        };
        bool more = version >= 3 && another();  // not if it was read from an earlier version, and written again
        if (more && member == "list") {
            at.list = hash();
            more = version >= 4 && another();
        }
        if (more && version >= 4 && member == "prepared")
            at.prepared = hash();
        else if (more)
            json_.fail("a sampler has no member " + in_quotes(member));
        json_.expect('}');
        return at;
    }
    std::uint64_t hash() {
        std::string const text = json_.string();
        std::uint64_t value = 0;
        for (char const c : text) {
            std::size_t const digit = std::string_view("0123456789abcdef").find(c);
            if (digit == std::string_view::npos) break;
            value = value << 4 | digit;
        }
        if (hexadecimal(value) != text) json_.fail("a digest has 16 hexadecimal digits");
        return value;
    }

    std::string_view text_;
    json_reader json_;
};

[[gnu::cold]] DDP_DECL checkpoint_manifest parse_manifest(std::string_view text, std::string const& file) {
    return manifest_parser(text, file).parse();
}

}  // namespace ddp::detail
