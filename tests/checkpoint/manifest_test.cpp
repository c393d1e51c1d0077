// The manifest of a checkpoint: the same text for the same thing, and a strict reader.
#include <ddp/checkpoint/manifest.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/digest.hpp>
#include <ddp/core/text.hpp>

#include "data/files.hpp"
#include "support/catch.hpp"

using namespace ddp;
using namespace ddp::detail;
using ::test::catch_error;

namespace {

checkpoint_manifest example() {
    checkpoint_manifest all;
    all.library = "0.1.0";
    all.step = 100;
    all.ranks = 4;
    all.shards = {{0, 4096, 0x0123456789abcdef}, {2, 17, 1}};
    all.identity = {0x1f, {{"w1", "adamw"}, {"w \"2\"", "sgd"}}};
    all.progress = training_progress{
        .completed_steps = 100, .begun_steps = 103, .last_weight = 24, .last_losses = -24.5, .previous_loss = 0.5};
    all.settings = {0.1875, {"w*", "two\nlines"}};
    all.sampler = {
        {.samples = 60000, .global_batch = 128, .seed = 18446744073709551615u, .shuffle = false}, 3, 41, 0x2a, 7};
    all.words = {{"schedule", "constant_rate"}, {"optimizer", "sgd, lr 0.1"}};
    all.entries = {{"note", "so far \"so\" good\n"}, {"\u00e9", ""}};
    return all;
}
/// A text with a digest that is right, whatever else is wrong.
std::string signed_again(std::string text) {
    std::size_t const at = text.rfind("\"digest\": ");
    char sum[17];
    std::snprintf(sum, sizeof sum, "%016llx",
                  static_cast<unsigned long long>(digest().add(std::string_view(text).substr(0, at)).value()));
    return text.substr(0, at) + "\"digest\": \"" + sum + "\"\n}\n";
}
std::string with(std::string text, std::string_view from, std::string_view to) {
    std::size_t const at = text.find(from);
    REQUIRE(at != text.npos);
    return signed_again(text.replace(at, from.size(), to));
}
std::string refused(std::string const& text) {
    auto const got = catch_error([&] { (void)parse_manifest(text, "m.json"); });
    REQUIRE(got.code == errc::format);
    REQUIRE(got.says("m.json: byte "));
    return got.text;
}
bool has(std::string const& text, std::string_view part) {
    return text.find(part) != text.npos;
}

}  // namespace

TEST_CASE("a manifest says what it was given, in the form that the manual shows", "[checkpoint]") {
    std::string const text = manifest_text(example());
    REQUIRE(text == signed_again(R"({
  "format": "ddp checkpoint",
  "format_version": 4,
  "library": "0.1.0",
  "step": 100,
  "ranks": 4,
  "shards": [
    {"file": "shard-00000-of-00004.safetensors", "bytes": 4096, "digest": "0123456789abcdef"},
    {"file": "shard-00002-of-00004.safetensors", "bytes": 17, "digest": "0000000000000001"}
  ],
  "model_hash": "000000000000001f",
  "optimizer": {"w \"2\"": "sgd", "w1": "adamw"},
  "begun_steps": 103,
  "last_weight": 24,
  "last_losses": "-0x1.88p+4",
  "previous_loss": "0x1p-1",
  "rate_factor": "0x1.8p-3",
  "frozen": ["w*", "two\nlines"],
  "settings": {"optimizer": "sgd, lr 0.1", "schedule": "constant_rate"},
  "sampler": {"epoch": 3, "position": 41, "samples": 60000, "global_batch": 128, "seed": 18446744073709551615, "shuffle": false, "drop_last": false, "list": "000000000000002a", "prepared": "0000000000000007"},
  "entries": {
    "note": "so far \"so\" good\n",
    "é": ""
  },
  "digest": "?"
}
)"));
    checkpoint_manifest const again = parse_manifest(text, "m.json");
    REQUIRE(manifest_text(again) == text);
    REQUIRE(again.step == 100);
    REQUIRE(again.shards[1].rank == 2);
    REQUIRE(again.sampler->position == 41);
    REQUIRE(again.entries == example().entries);

    checkpoint_manifest small = example();
    small.identity.reset();
    small.progress.reset();
    small.sampler.reset();
    small.settings.reset();
    small.entries = {};
    small.words = {};
    checkpoint_manifest const read = parse_manifest(manifest_text(small), "m.json");
    REQUIRE_FALSE((read.sampler.has_value() || read.settings.has_value()));
    REQUIRE_FALSE((read.identity.has_value() || read.progress.has_value()));
    for (double const number : {0.0, -0.0, 0.1, -1e-320, 1e300, HUGE_VAL, -HUGE_VAL}) {
        small.progress = training_progress{.last_losses = number};
        training_progress const at = *parse_manifest(manifest_text(small), "m.json").progress;
        REQUIRE(at.last_losses == number);
        REQUIRE(std::signbit(at.last_losses) == std::signbit(number));
        REQUIRE(std::isnan(at.previous_loss));
        REQUIRE(at.completed_steps == 100);
    }
    for (double const factor : {0.0, -0.0, 1.0, 0.1, 1e-320, 1e300}) {
        small.settings = {factor, {}};
        REQUIRE(parse_manifest(manifest_text(small), "m.json").settings->rate_factor == factor);
    }
    // What versions 1 and 2 wrote.
    REQUIRE(
        parse_manifest(with(manifest_text(read), "\"format_version\": 4", "\"format_version\": 1"), "m.json").step ==
        100);
    checkpoint_manifest second = example();
    second.identity.reset();
    second.progress.reset();
    second.sampler->list.reset();
    second.sampler->prepared.reset();
    second.words = {};
    checkpoint_manifest const two =
        parse_manifest(with(manifest_text(second), "\"format_version\": 4", "\"format_version\": 2"), "m.json");
    REQUIRE(two.settings->rate_factor == 0.1875);
    REQUIRE(two.sampler->position == 41);
    REQUIRE_FALSE(two.sampler->list.has_value());
    REQUIRE(manifest_text(parse_manifest(manifest_text(two), "m.json")) == manifest_text(second));
    second.sampler->list = 0x2a;
    checkpoint_manifest const three =
        parse_manifest(with(manifest_text(second), "\"format_version\": 4", "\"format_version\": 3"), "m.json");
    REQUIRE((three.sampler->list == 0x2a && !three.sampler->prepared && three.words.empty()));
}

TEST_CASE("every beginning of a manifest, and every flipped bit in it, is an error with words", "[checkpoint]") {
    std::string const text = manifest_text(example());
    for (std::size_t n = 0; n + 1 < text.size(); ++n) (void)refused(text.substr(0, n));
    REQUIRE(has(refused(""), "the manifest ends too early"));
    for (std::size_t i = 0; i < text.size(); ++i)
        for (int bit = 0; bit < 8; ++bit) {
            std::string damaged = text;
            damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
            CAPTURE(i, bit);
            std::size_t const last = text.rfind("\"digest\"");
            // white space behind the digest says nothing
            if (i > last && (text[i] == ' ' || text[i] == '\n') &&
                std::string_view(" \n\t\r").find(damaged[i]) != std::string_view::npos)
                continue;
            (void)refused(damaged);
        }
}

TEST_CASE("what no manifest says is refused, whatever its digest", "[checkpoint]") {
    std::string const text = manifest_text(example());
    REQUIRE(has(refused(with(text, "ddp checkpoint", "ddp")), "this is not a manifest of a checkpoint"));
    for (char const* const version : {"0", "5"})
        REQUIRE(has(refused(with(text, "\"format_version\": 4", concat({"\"format_version\": ", version}))),
                    concat({"format_version is ", version, ", this library reads 1 to 4"})));
    for (char const* const version : {"1", "2"})
        REQUIRE(has(refused(with(text, "\"format_version\": 4", concat({"\"format_version\": ", version}))),
                    "expected 'entries', found 'model_hash'"));
    REQUIRE(has(refused(with(text, "\"format_version\": 4", "\"format_version\": 3")),
                "expected 'entries', found 'settings'"));
    REQUIRE(has(refused(with(text, "\"prepared\": ", "\"changed\": ")), "a sampler has no member 'changed'"));
    REQUIRE(has(refused(with(text, "\"list\": ", "\"prepared\": ")), "expected '}'"));
    for (char const* const number :
         {"0x3p-4", "1.5", "", "-nan", "0x", "-", "+0x1p+0", "0x1.8p-3 ", "-inf ", "0x1p99999"})
        REQUIRE(has(refused(with(text, "-0x1.88p+4", number)), "is not a number such as '-0x1p-1'"));
    REQUIRE(
        has(refused(with(text, "\"model_hash\": \"", "\"model_hash\": \"x")), "a digest has 16 hexadecimal digits"));
    REQUIRE(has(refused(with(text, "\"w1\": \"adamw\"", "\"w1\": 3")), "expected"));
    for (char const* const factor :
         {"0x3p-4", "-0x1p+0", "0x-0p+0", "0xinf", "0xnan", "1.5", "", "0x", "0x1.8p-3 ", "0x1p99999"})
        REQUIRE(has(refused(with(text, "0x1.8p-3", factor)), "is not a factor of the learning rate"));
    REQUIRE(has(refused(with(text, "\"frozen\": [", "\"frozen\": [[")), "expected"));
    REQUIRE(has(refused(with(text, "\"step\"", "\"stop\"")), "expected 'step', found 'stop'"));
    REQUIRE(has(refused(with(text, "\"ranks\": 4", "\"ranks\": 0")), "no job has 0 ranks"));
    REQUIRE(has(refused(with(text, "\"ranks\": 4", "\"ranks\": 99999999999")), "no job has 99999999999 ranks"));
    REQUIRE(
        has(refused(with(text, "shard-00002-of-00004", "../../../etc/passwd")), "is not the shard that comes next"));
    REQUIRE(
        has(refused(with(text, "shard-00002-of-00004", "shard-00000-of-00004")), "is not the shard that comes next"));
    REQUIRE(
        has(refused(with(text, "shard-00002-of-00004", "shard-00004-of-00004")), "is not the shard that comes next"));
    REQUIRE(has(refused(with(text, "shard-00000-of-00004", "shard-00001-of-00004")), "rank 0 has no shard"));
    REQUIRE(has(refused(with(text, "0123456789abcdef", "0123456789ABCDEF")), "a digest has 16 hexadecimal digits"));
    REQUIRE(has(refused(with(text, "\"bytes\": 17", "\"bytes\": -17")), "whole number that is not negative"));
    REQUIRE(has(refused(with(text, "false", "no")), "expected true or false"));
    REQUIRE(has(refused(with(text, "\"note\"", "\"\u00e9\"")), "twice"));
    REQUIRE(has(refused(text + "{"), "something after the manifest's last '}'"));
}
