/// \file
/// weights: a model's parameters and buffers in a safetensors file, saved and loaded by all ranks together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/all_gather.hpp>
#include <ddp/collective/broadcast.hpp>
#include <ddp/collective/call.hpp>
#include <ddp/collective/until_all_know.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/posted.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/safetensors.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/weights_file.hpp>

namespace ddp {

namespace detail {

/// The outcome of a rank's part, as it is sent.
struct file_outcome {
    std::uint64_t code = 0;        // of the error; 0: all is well
    std::uint64_t text_bytes = 0;  // of the error's text, or of the path
    std::uint64_t digest = 0;      // of the error's text, or of what was read
};
static_assert(std::has_unique_object_representations_v<file_outcome>);

/// `f` returns a digest of what it has read. An error of a file does not fail the job: agree_on_outcome tells the other
/// ranks. Any other exception, from the model or for lack of memory, fails the job as in a step.
template <Transport T, class F>
void attempt(communicator<T> const& comm, file_outcome& mine, std::string& text, F&& f) {
    try {
        mine = {0, text.size(), std::forward<F>(f)()};
    } catch (error const& e) {
        text = text_of(e);
        mine = {static_cast<std::uint64_t>(e.code()), text.size(), digest().add(text).value()};
    } catch (...) {
        comm.fail(std::current_exception());
        throw;
    }
}

/// Collective. Returns if all is well on every rank, and all have read the same; otherwise all of them throw one error,
/// which names the ranks concerned unless all are. The communicator stays usable.
template <Transport T>
void agree_on_outcome(communicator<T> const& comm, file_outcome const& mine, std::string text, char const* operation) {
    std::vector<file_outcome> all(static_cast<std::size_t>(comm.size()));
    all[static_cast<std::size_t>(comm.rank())] = mine;
    call(comm, about<file_outcome>(operation, 1), [&](auto over) { return all_gather_small(over, std::span(all)); });
    auto const rank_of = [&](auto const& place) { return static_cast<int>(place - all.begin()); };
    auto const failed = [](file_outcome const& o) { return o.code != 0; };
    auto worst = std::find_if(all.begin(), all.end(), failed);
    bool const differs = worst == all.end();
    if (differs)
        worst = std::find_if(all.begin(), all.end(), [&](auto const& o) { return o.digest != all.front().digest; });
    if (worst == all.end()) return;

    text.resize(static_cast<std::size_t>(worst->text_bytes));
    int const speaker = rank_of(worst);
    posted const words(comm, std::move(text));
    call(comm, about<char>(operation, words->size(), "what went wrong", speaker),
         [&](auto over) { return broadcast(over, as_mutable_bytes(std::span<char>(*words)), speaker); });
    text = printable(*words, words->size());  // another rank's, maybe; all of its lines
    bool const everywhere = std::all_of(
        all.begin(), all.end(), [&](auto const& o) { return o.code == worst->code && o.digest == worst->digest; });
    if (!everywhere) text = "rank " + std::to_string(comm.members().world_rank(speaker)) + ": " + text;
    if (differs) text += ": its values or metadata differ from those in the file that rank 0 read";
    std::string others;
    for (auto o = worst + 1; o != all.end(); ++o)
        if (!everywhere && (differs ? o->digest != all.front().digest : failed(*o)))
            others += (others.empty() ? "" : ", ") + std::to_string(comm.members().world_rank(rank_of(o)));
    if (!others.empty()) text += " (something went wrong on other ranks as well: " + others + ")";
    until_all_know(comm, operation);
    if (static_cast<errc>(worst->code) == errc::usage) throw usage_error(text);
    throw data_error(differs ? errc::format : static_cast<errc>(worst->code), text);
}

template <Transport T>
void expect_between_steps(communicator<T> const& comm) {
    comm.check();
    DDP_EXPECTS(!comm.exclusively([&] { return comm.tasks().under_way(comm.members()); }),
                "a step is under way: weights are saved and loaded between steps, after finish()");
}

template <class C>
concept TrainerLike = requires(C& trainer) {
    trainer.model();
    trainer.comm();
    trainer.torn();
    trainer.completed_steps();
};

}  // namespace detail

/// Saves the parameters and buffers of rank 0's model in a safetensors file. Returns on every rank when the file is on
/// the disk, or throws the same error on every rank. After a data_error nothing has changed, and training can continue.
/// Collective. `metadata`: rank 0's texts to store in the file; "ddp.version" among them replaces the library's own.
///
/// Cost    the other ranks wait for rank 0, for at most timing.collective.
/// Throws  data_error (errc::file) if the file cannot be written; usage_error for names that are not unique, for names or
///         metadata that are not UTF-8, or while a step is under way (docs/semantics.md); comm_error if the job fails,
///         including by an exception of the model.
template <Transport T, Model M>
void save_weights(communicator<T> const& comm, M& model, std::string const& path, string_map metadata = {}) {
    detail::expect_between_steps(comm);
    detail::file_outcome mine;
    std::string text = path;
    if (comm.rank() == 0)
        detail::attempt(comm, mine, text, [&] {
            detail::write_weights(model, path, std::move(metadata));
            return std::uint64_t{0};
        });
    detail::agree_on_outcome(comm, mine, std::move(text), "save_weights");
}

/// Loads parameters and buffers of the model from a safetensors file, which every rank reads, and returns its metadata.
/// No model is changed before all ranks have read the whole file and compared what they have read. Collective. Gradients
/// that a trainer has accumulated are kept: its next step applies them to the new values.
///
/// Cost    two passes over the file on each rank, and two small exchanges.
/// Throws  the same on every rank: data_error with errc::file if the file is missing or cannot be read, and with
///         errc::format if it violates the format, if its names, types or shapes are not those of the model, or if its
///         contents differ from what rank 0 has read. The text names the ranks concerned unless all are. usage_error
///         while a step is under way; comm_error. If a file changes or cannot be read after models have begun to change, the
///         communicator can no longer be used.
template <Transport T, Model M>
string_map load_weights(communicator<T> const& comm, M& model, std::string const& path,
                        safetensors_limits const& limits = {}) {
    return load_weights_as(comm, model, path, {.limits = limits}).metadata;
}

/// Like load_weights, from a file whose names and types may differ from those of the model. `options` must be the same
/// on every rank: it is an error if ranks load different tensors, just as if files differ. Collective. See the form
/// without a communicator for details.
template <Transport T, Model M>
load_report load_weights_as(communicator<T> const& comm, M& model, std::string const& path,
                            load_options const& options) {
    detail::expect_between_steps(comm);
    detail::file_outcome mine;
    std::string text = path;
    std::optional<detail::weights_file> file;
    detail::attempt(comm, mine, text, [&] { return file.emplace(model, path, options).read(false); });
    detail::agree_on_outcome(comm, mine, text, "load_weights");
    detail::attempt(comm, mine, text, [&] { return detail::put_in_place(model, *file, mine.digest); });
    try {
        detail::agree_on_outcome(comm, mine, text, "load_weights");
    } catch (data_error const&) {  // some ranks hold the new values, some a mixture: no rank may continue
        comm.fail(std::current_exception());
        throw;
    }
    return file->report();
}

/// Saves the model of a trainer, and its number of completed steps as the metadata "ddp.steps". Collective. Throws like
/// the form with a communicator, and usage_error on all ranks if the ranks of a local_parallel hold different values.
/// After a step that failed half-way, nothing is written.
template <detail::TrainerLike C>
void save_weights(C& trainer, std::string const& path, string_map metadata = {}) {
    detail::expect_between_steps(trainer.comm());  // a failure may tear values
    if constexpr (requires { trainer.expect_between_steps("save_weights"); })
        trainer.expect_between_steps("save_weights");
    metadata.emplace("ddp.steps", std::to_string(trainer.completed_steps()));
    save_weights(trainer.comm(), trainer.model(), path, std::move(metadata));
}

/// Loads into the model of a trainer, which continues from these values in its next step; the state of the optimizer does
/// not change, and a local_parallel's strategy starts over (local_parallel::values_replaced). Collective. Throws like the
/// form with a communicator, and usage_error on all ranks if the ranks of a local_parallel hold different values and
/// `options` may leave some of these unchanged (not strict, or a model_prefix).
template <detail::TrainerLike C>
load_report load_weights_as(C& trainer, std::string const& path, load_options const& options) {
    constexpr bool meets = requires { trainer.values_replaced(); };
    if constexpr (meets) {
        trainer.expect_no_step("load_weights_as");
        if (!options.strict || !options.model_prefix.empty()) trainer.expect_between_steps("load_weights_as");
    }
    load_report report = load_weights_as(trainer.comm(), trainer.model(), path, options);
    if constexpr (meets) trainer.values_replaced();
    return report;
}

/// Loads a file whose names and types are those of the model into the model of a trainer, as load_weights_as(trainer, …)
/// does. Collective. Throws like the form with a communicator.
template <detail::TrainerLike C>
string_map load_weights(C& trainer, std::string const& path, safetensors_limits const& limits = {}) {
    return load_weights_as(trainer, path, {.limits = limits}).metadata;
}

}  // namespace ddp
