/// \file
/// Agreement: before the first step ranks compare what they are about to train, and name what differs.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/concepts.hpp>
#include <ddp/collective/until_all_know.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/posted.hpp>
#include <ddp/comm/small_gather.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>
#include <ddp/core/version.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/options.hpp>
#include <ddp/transport/any.hpp>

namespace ddp::detail {

/// One line for each parameter: what must be the same on all ranks.
template <Element E>
[[gnu::cold]] std::string describe(std::span<parameter<E> const> parameters) {
    std::string text;
    auto const list = [&](std::vector<std::size_t> const& numbers) {
        for (std::size_t k = 0; k < numbers.size(); ++k) text += concat({k == 0 ? "[" : " x ", numbers[k]});
        text += numbers.empty() ? "[]" : "]";
    };
    for (parameter<E> const& p : parameters) {
        text += concat({"'", p.name, "' "});
        list(p.shape);
        if (!p.strides.empty()) {
            text += " strides ";
            list(p.strides);
        }
        text += concat({" ", element_name<E>, "\n"});
    }
    return text;
}

/// What a rank is about to do, as hashes: each has a name in the error.
struct agenda {
    static constexpr std::array<std::string_view, 6> names = {"version of the library",
                                                              "hash() of the model",
                                                              "value of the model's `contiguous` or `ready_releases`",
                                                              "allreduce algorithm, exchange or strategy",
                                                              "optimizer or its settings",
                                                              "bucket policy"};
    static constexpr std::size_t model = 1, exchange = 3, optimizer = 4, buckets = 5;
    std::array<std::uint64_t, names.size() + training_options::hash_names.size()> hashes = {};
    /// `options`: the type that the trainer's user sets them in.
    [[nodiscard]] static std::string name_of(std::size_t k, std::string_view options) {
        return k < names.size() ? std::string(names[k])
                                : concat({options, ".", training_options::hash_names[k - names.size()]});
    }
    /// The n-th hash to be compared: options, and how the model's memory is placed, come before the hashes that depend
    /// on them, such as that of the bucket plan.
    [[nodiscard]] static constexpr std::size_t in_order(std::size_t n) {
        constexpr std::size_t first = 3, options = training_options::hash_names.size();
        return n < first ? n : n < first + options ? names.size() + n - first : n - options;
    }
    std::uint64_t parameters = 0;   // of the description
    std::uint64_t description = 0;  // its bytes
    std::uint64_t settings = 0;     // bytes of the text behind it
    std::uint64_t next_context = 0;
};
static_assert(std::has_unique_object_representations_v<agenda>);  // it travels: no padding
/// What messages call a trainer and its options.
struct trainer_names {
    char const* trainer;
    char const* options;
};
/// What some of the hashes stand for, as text for messages, in the order of the hashes; empty where there is nothing to
/// show.
using agenda_words = std::array<std::string, std::tuple_size_v<decltype(agenda::hashes)>>;
[[nodiscard]] inline agenda_words words_of(training_options const& options, std::string model, std::string buckets,
                                           std::string exchange, std::string optimizer) {
    agenda_words all;
    std::ranges::replace(model, '\n', ' ');  // the user's text: each entry is one line
    all[agenda::model] = std::move(model);
    all[agenda::buckets] = std::move(buckets);
    all[agenda::exchange] = std::move(exchange);
    all[agenda::optimizer] = std::move(optimizer);
    std::ranges::move(options.hash_words(), all.begin() + agenda::names.size());
    return all;
}

/// Line k of several.
[[nodiscard]] inline std::string_view line_of(std::string_view lines, std::size_t k) {
    for (; k > 0; --k) lines.remove_prefix(std::min(lines.find('\n'), lines.size() - 1) + 1);
    return lines.substr(0, lines.find('\n'));
}

/// Removes the first part and the separator after it from `text`, and returns the part.
[[nodiscard]] inline std::string_view take_part(std::string_view& text, std::string_view separator) {
    std::size_t const end = text.find(separator);
    std::string_view const first = text.substr(0, end);
    text.remove_prefix(end == text.npos ? text.size() : end + separator.size());
    return first;
}

[[nodiscard]] inline std::string_view or_absent(std::string_view part) {
    return part.empty() ? "absent" : part;
}

/// The first parts in which two lists differ, "absent" where one has ended; the lists differ.
[[nodiscard]] inline std::pair<std::string_view, std::string_view> first_parts_that_differ(std::string_view zero,
                                                                                           std::string_view other) {
    std::string_view a, b;
    while (a == b && !(zero.empty() && other.empty())) a = take_part(zero, "; "), b = take_part(other, "; ");
    return {or_absent(a), or_absent(b)};
}

/// Text about the first line in which two descriptions differ.
inline std::string first_difference(std::string_view zero, std::string_view other, std::string const& name_of_zero,
                                    std::string const& name_of_other) {
    for (std::size_t i = 0; !zero.empty() || !other.empty(); ++i) {
        std::string_view const a = take_part(zero, "\n"), b = take_part(other, "\n");
        if (a == b) continue;
        bool const buffer = a.starts_with("buffer ") || b.starts_with("buffer ");  // they come after all parameters
        std::string const what = buffer ? "their buffers differ: " : concat({"parameter #", i, " is "});
        return concat({what, or_absent(a), " on ", name_of_zero, " and ", or_absent(b), " on ", name_of_other});
    }
    return "the parameters are listed differently";
}

/// Ranks exchange their agendas; if one differs from rank 0's, every rank throws the same error. `*context` is then a
/// message context that is free on all of them. `text`: the description, then a line for each hash.
template <Transport T>
task<> expect_agreement(lane<T> over, std::string_view text, agenda mine, trainer_names names, std::uint32_t* context) {
    auto const name = [&](int rank) { return "rank " + std::to_string(over.of->world_rank(rank)); };
    std::vector<agenda> all(static_cast<std::size_t>(over.size()));
    mine.next_context = over.on->next_context();
    all[static_cast<std::size_t>(over.rank())] = mine;
    if (over.size() > 1) co_await all_gather_small(over, std::span<agenda>(all));
    for (agenda const& each : all) *context = std::max(*context, static_cast<std::uint32_t>(each.next_context));
    over.on->take_contexts_below(*context + 1);
    for (int rank = 1; rank < over.size(); ++rank) {
        agenda const &zero = all.front(), &other = all[static_cast<std::size_t>(rank)];
        bool const same_model = zero.parameters == other.parameters;
        if (same_model && zero.hashes == other.hashes) continue;
        // The lowest rank that differs writes the message for all.
        if (over.rank() == 0) {
            operation out;
            over.phase(1).send(out, rank, as_const_bytes(std::span<char const>(text)));
            co_await out;
        }
        if (over.rank() == rank) {
            scratch const memory(zero.description + zero.settings);
            operation in;
            over.phase(1).receive(in, 0, memory.bytes());
            co_await in;
            std::string_view const from_zero(memory.as<char>().data(), memory.as<char>().size());
            std::string said = name(rank) + " differs from " + name(0) + ": ";
            if (!same_model) {
                said += first_difference(from_zero.substr(0, zero.description), text.substr(0, mine.description),
                                         name(0), name(rank));
            } else {
                bool first = true;
                for (std::size_t n = 0; n < zero.hashes.size(); ++n) {
                    std::size_t const k = agenda::in_order(n);
                    if (zero.hashes[k] == other.hashes[k] || (!first && k == agenda::buckets))
                        continue;  // these follow
                    std::string_view const theirs = line_of(from_zero.substr(zero.description), k),
                                           ours = line_of(text.substr(mine.description), k);
                    said += concat(
                        {std::exchange(first, false) ? "another " : "; another ", agenda::name_of(k, names.options)});
                    if (theirs == ours || said.size() > sizeof(failure::text) / 2) continue;
                    auto const [on_zero, here] = first_parts_that_differ(theirs, ours);
                    said += concat({" (", on_zero, " on ", name(0), ", ", here, " on ", name(rank), ")"});
                }
            }
            over.on->fail(failure_kind::mismatch, errc::model_differs, over.of->world_rank(rank),
                          said + ". Build the same model with the same trainer settings on all ranks.", over.of);
            throw collective_aborted();
        }
        std::byte nothing{};
        operation words;  // no message ever arrives here: that rank fails the job, or is the culprit
        over.phase(2).receive(words, rank, {&nothing, 1});
        co_await words;
    }
}

/// What ranks have agreed on: the hash of all that they are about to train, which their messages carry from then on, and a
/// message context that is theirs alone.
struct start_agreement {
    std::uint64_t hash = 0;
    std::uint32_t context = 0;
};

/// Compares what ranks are about to train. `buffers`: a description; `words`: one line each. Throws comm_error, the
/// same on every rank, if they differ.
template <Transport T, Element E>
[[gnu::cold]] start_agreement agree_on_start(communicator<T> const& comm, std::span<parameter<E> const> parameters,
                                             std::string const& buffers, agenda mine, agenda_words const& words,
                                             trainer_names names) {
    posted const text(comm, describe(parameters) + buffers);
    mine.parameters = digest().add(*text).value();
    mine.description = text->size();
    for (std::string const& line : words) *text += line + "\n";
    mine.settings = text->size() - mine.description;
    operation_info what;
    what.name = names.trainer;
    what.fingerprint = agree(names.trainer, 0, "", "");
    start_agreement result;
    comm.run([&] { return expect_agreement(comm.enter(what), *text, mine, names, &result.context); });
    digest all;
    for (std::uint64_t const hash : mine.hashes) all.add(hash);
    result.hash = all.add(mine.parameters).value();
    return result;
}

/// Returns if all ranks pass the same factor, a finite number >= 0; otherwise all of them throw the same usage_error,
/// which names a rank and its factor. Collective; the communicator stays usable.
template <Transport T>
void agree_on_factor(communicator<T> const& comm, char const* operation, std::uint64_t fingerprint, double mine) {
    std::vector<double> all(static_cast<std::size_t>(comm.size()), mine);
    if (comm.size() > 1) {
        operation_info what;
        what.name = operation;
        what.fingerprint = fingerprint;
        comm.run([&] { return all_gather_small(comm.enter(what), std::span<double>(all)); });
    }
    auto const name = [&](std::size_t rank) { return comm.members().members()[rank]; };
    auto const text = [](double number) {
        std::ostringstream out;
        out.precision(17), out << number;
        return out.str();
    };
    auto const first = [&](auto is) { return static_cast<std::size_t>(std::ranges::find_if(all, is) - all.begin()); };
    std::size_t const wrong = first([](double factor) { return !is_finite(factor) || factor < 0; }),
                      other = first([&](double factor) { return factor != all[0]; });
    if (std::min(wrong, other) == all.size()) return;
    until_all_know(comm, operation);
    if (wrong != all.size())
        throw usage_error(concat({operation, ": rank ", name(wrong), " passes ", text(all[wrong]),
                                  "; a factor of the learning rate is a finite number >= 0"}));
    throw usage_error(concat(
        {operation, ": rank ", name(0), " passes ", text(all[0]), " and rank ", name(other), " ", text(all[other]),
         "; nothing was changed. Pass the same on all ranks: let rank 0 decide, and broadcast what "
         "it has decided"}));
}

/// Whether all ranks pass the same value. If not, every rank knows when this returns, so that all can throw the same error.
template <Transport T>
bool all_alike(communicator<T> const& comm, char const* operation, std::uint64_t fingerprint, std::uint64_t value) {
    std::vector<std::uint64_t> all(static_cast<std::size_t>(comm.size()));
    all[static_cast<std::size_t>(comm.rank())] = value;
    operation_info what;
    what.name = operation;
    what.fingerprint = fingerprint;
    comm.run([&] { return all_gather_small(comm.enter(what), std::span<std::uint64_t>(all)); });
    bool const alike = std::all_of(all.begin(), all.end(), [&](std::uint64_t one) { return one == all.front(); });
    if (!alike) until_all_know(comm, operation);
    return alike;
}

/// Called when this rank's backward has reported parameters wrongly: throws the error that every rank throws.
template <Transport T>
[[noreturn]] void fail_gradient(communicator<T> const& comm, std::string const& complaint) {
    int const rank = comm.members().world_rank(comm.rank());
    std::string const text = "rank " + std::to_string(rank) + ": " + complaint;
    comm.exclusively([&] { comm.tasks().fail(failure_kind::mismatch, errc::gradient, rank, text); });
    comm.check();
    throw error(errc::gradient, text);  // not reached: the communicator has failed
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE void fail_gradient(communicator<any_transport> const&, std::string const&);
DDP_INSTANTIATE start_agreement agree_on_start(communicator<any_transport> const&, std::span<parameter<float> const>,
                                               std::string const&, agenda, agenda_words const&, trainer_names);
DDP_INSTANTIATE start_agreement agree_on_start(communicator<any_transport> const&, std::span<parameter<double> const>,
                                               std::string const&, agenda, agenda_words const&, trainer_names);
DDP_INSTANTIATE void agree_on_factor(communicator<any_transport> const&, char const*, std::uint64_t, double);
DDP_INSTANTIATE bool all_alike(communicator<any_transport> const&, char const*, std::uint64_t, std::uint64_t);
DDP_INSTANTIATE task<> expect_agreement(lane<any_transport>, std::string_view, agenda, trainer_names, std::uint32_t*);
#endif

}  // namespace ddp::detail
