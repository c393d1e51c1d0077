/// \file
/// Which parts of a training a checkpoint contains, and how they are restored.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/checkpoint/directory.hpp>
#include <ddp/checkpoint/lines_of_ranks.hpp>
#include <ddp/checkpoint/manifest.hpp>
#include <ddp/checkpoint/reader.hpp>
#include <ddp/checkpoint/writer.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/error.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/state_slice.hpp>
#include <ddp/train/user_code.hpp>
#include <ddp/train/weights.hpp>
#include <ddp/train/weights_file.hpp>

namespace ddp::detail {

template <class C>
concept KeptTrainer = TrainerLike<C> && requires(C& trainer, state_visitor visit) {
    trainer.for_each_state(visit);
    trainer.set_completed_steps(std::uint64_t{});
    trainer.between_steps();
};

/// Has settings that a program may change between steps: all of them, like data_parallel, or only which parameters are
/// frozen, like local_parallel.
template <class C>
concept FreezableTrainer = requires(C& trainer) { trainer.set_frozen(trainer.frozen()); };
template <class C>
concept ChangeableTrainer =
    FreezableTrainer<C> && requires(C& trainer) { trainer.set_rate_factor(trainer.rate_factor()); };

template <class C>
void expect_kept_between_steps(C& trainer) {
    expect_between_steps(trainer.comm());  // a failure may tear values
    // The ranks of a local_parallel may hold different values.
    if constexpr (requires { trainer.expect_between_steps("checkpoints"); })
        trainer.expect_between_steps("checkpoints");
    DDP_EXPECTS(trainer.between_steps(),
                "checkpoints are saved and resumed between steps: finish() the step first, including accumulated "
                "gradients");
}

/// Runs f(), which calls the user's code while the other ranks wait: if it throws, they are told.
template <class C, class F>
decltype(auto) run_code_of_user(C& trainer, F&& f) {
    return run_user_code(std::forward<F>(f), [&](std::exception_ptr thrown) { trainer.comm().fail(thrown); });
}

/// Lists the state on this rank, and the part of it that this rank writes: the part that no other rank writes.
template <class C>
void list_state(C& trainer, checkpoint_content& content) {
    std::vector<std::pair<std::string, std::string>> shapes;
    std::vector<std::string> names;
    std::vector<bool> shared;
    auto const list = [&](state_slice const& s) {
        if (s.count() == 0) return;
        std::size_t whole = 1;
        for (std::size_t const extent : s.shape) whole *= extent;
        std::vector<std::size_t> shape{s.count()};
        if (whole == s.count()) shape.assign(s.shape.begin(), s.shape.end());
        content.tensors.push_back({state_tensor_name(s), s.type, std::move(shape), s.bytes});
        shared.push_back(!s.per_rank);
        if (!s.per_rank) names.push_back(content.tensors.back().name);
        shapes.emplace_back(state_key(s), extents_text(s.shape));
    };
    run_code_of_user(trainer, [&] { trainer.for_each_state(list); });
    std::vector<std::string> rank_0s =
        lines_of(text_of_rank_0(trainer.comm(), trainer.comm().rank() == 0 ? joined_lines(names) : std::string()));
    sort_unique(rank_0s);
    if (trainer.comm().rank() != 0) {
        std::size_t left = 0;
        for (std::size_t i = 0; i < shared.size(); ++i)
            if (!shared[i] || !std::binary_search(rank_0s.begin(), rank_0s.end(), content.tensors[i].name)) {
                if (left != i) content.tensors[left] = std::move(content.tensors[i]);
                ++left;
            }
        content.tensors.resize(left);
    }
    std::sort(shapes.begin(), shapes.end());  // so that adding them takes no time
    for (auto& [key, shape] : shapes) content.metadata.emplace(std::move(key), std::move(shape));
}

/// Buffers that may differ between ranks; none if all ranks have rank 0's.
template <class C>
[[nodiscard]] std::vector<model_buffer> buffers_of_rank(C& trainer) {
    if constexpr (requires { trainer.model().buffers(), trainer.buffers_alike(); })
        if (trainer.comm().size() > 1 && !trainer.buffers_alike()) return trainer.model().buffers();
    return {};
}
[[nodiscard]] inline state_slice slice_of(model_buffer const& buffer) {
    return {.of = buffer.name,
            .name = {},
            .shape = buffer.shape,
            .type = buffer.type,
            .bytes = buffer.bytes,
            .per_rank = true};
}
/// What ranks other than 0 write of them: rank 0's are written as part of the model.
template <class C>
void list_buffers(C& trainer, checkpoint_content& content) {
    for (model_buffer const& b : buffers_of_rank(trainer)) {
        if (b.bytes.empty()) continue;
        state_slice const s = slice_of(b);
        content.tensors.push_back({state_tensor_name(s), s.type, {s.count()}, s.bytes});
        content.metadata.emplace(state_key(s), extents_text(s.shape));
    }
}

/// What identifies the training but is in no tensor.
template <class C>
[[nodiscard]] training_identity identity_of(C& trainer) {
    training_identity own;
    if constexpr (requires { trainer.model().hash(); })
        own.model_hash = static_cast<std::uint64_t>(trainer.model().hash());
    if constexpr (requires { trainer.optimizer_names(); }) {
        std::vector<std::string> const names = trainer.optimizer_names();
        std::vector<std::pair<std::string, std::string>> all;
        for (std::size_t i = 0; i < names.size(); ++i) all.emplace_back(trainer.parameters()[i].name, names[i]);
        if (std::adjacent_find(names.begin(), names.end(), std::not_equal_to<>()) == names.end())
            all.assign(names.empty() ? 0 : 1, {"*", names.empty() ? "" : names.front()});
        std::sort(all.begin(), all.end());  // so that adding them takes no time
        for (auto& [parameter, name] : all)
            if (!name.empty()) own.optimizers.emplace(std::move(parameter), std::move(name));
    }
    return own;
}

/// The settings of a trainer that has some.
template <class C>
[[nodiscard]] std::optional<trainer_settings> settings_of(C& trainer) {
    std::optional<trainer_settings> all;
    if constexpr (FreezableTrainer<C>) {
        all.emplace();
        if constexpr (ChangeableTrainer<C>) all->rate_factor = trainer.rate_factor();
        for (std::size_t i = 0; i < trainer.frozen().size(); ++i)
            if (trainer.frozen()[i] != 0) all->frozen.push_back(trainer.parameters()[i].name);
    }
    return all;
}

[[nodiscard]] inline sampler_place place_of(sampler const& batches) {
    sampler_place at{batches.options(), batches.epoch(), batches.position(), batches.digest_of_list()};
    if (batches.digest_of_preparation() != 0) at.prepared = batches.digest_of_preparation();
    return at;
}

/// What was told another trainer than this one is, a line each; empty if nothing is known to differ.
[[nodiscard]] inline std::string other_settings(string_map const& then, string_map const& now) {
    auto const line = [](std::string words) {  // of a file or a user: no control characters
        std::ranges::replace(words, '\n', ' ');
        return printable(words);
    };
    std::string text;
    for (auto const& [name, words] : then)
        if (now.contains(name) && now.at(name) != words)
            text += concat(
                {"\n  ", line(name), ": ", line(words), " in the checkpoint, ", line(now.at(name)), " in this one"});
    return text;
}

/// Collective: the trainer continues where `from` was written. Throws data_error, the same on every rank, if `from`
/// belongs to another training; nothing has changed then. If reading a file fails later, the communicator fails too.
template <class C>
void continue_from(C& trainer, sampler* batches, checkpoint_reader& from) {
    auto const& comm = trainer.comm();
    bool const as_many = from.manifest().ranks == comm.size();
    bool missing = false;
    auto const kept = [&](state_slice const& s) {
        return s.per_rank ? as_many : !s.optional || from.has(s, comm.rank());
    };
    std::vector<std::string> lines;
    run_code_of_user(trainer, [&] {
        trainer.for_each_state([&](state_slice const& s) {
            if (s.count() != 0) lines.push_back(state_line(s));
        });
    });
    lines = lines_of_all(comm, std::move(lines));
    std::vector<kept_tensor> model;
    std::vector<std::uint8_t> frozen;
    file_outcome mine;
    std::string text = from.path();
    attempt(comm, mine, text, [&] {
        model = kept_tensors(trainer.model());
        if constexpr (requires { trainer.frozen_from_the_start(); }) {
            std::vector<std::string_view> apart;
            for (std::size_t i = 0; i < trainer.parameters().size(); ++i)
                if (trainer.frozen_from_the_start()[i] != 0) apart.push_back(trainer.parameters()[i].name);
            from.expect_like(model, lines, batches, identity_of(trainer), &apart);
        } else {
            from.expect_like(model, lines, batches, identity_of(trainer));
        }
        from.expect_settings_for(ChangeableTrainer<C>, FreezableTrainer<C>);
        if constexpr (FreezableTrainer<C>) {
            std::vector<std::string_view> names;
            for (auto const& p : trainer.parameters()) names.push_back(p.name);
            frozen = from.frozen_among(names);
            if constexpr (requires { trainer.frozen_from_the_start(); })
                for (std::size_t i = 0; i < frozen.size(); ++i) frozen[i] |= trainer.frozen_from_the_start()[i];
        }
        trainer.for_each_state([&](state_slice const& s) {
            if (kept(s)) from.expect_covered(s, comm.rank());
            missing = missing || (s.optional && !kept(s));
        });
        return std::uint64_t{0};
    });
    agree_on_outcome(comm, mine, text, "resume");

    text = from.path();
    attempt(comm, mine, text, [&] {
        std::uint64_t const values = from.read_model(model);
        trainer.for_each_state([&](state_slice const& s) {
            if (kept(s))
                from.read_state(s, comm.rank());
            else
                std::fill(s.bytes.begin(), s.bytes.end(), std::byte{0});
        });
        for (model_buffer const& b : buffers_of_rank(trainer))  // else they are rank 0's
            if (state_slice const s = slice_of(b); as_many && s.count() != 0 && from.has(s, comm.rank()))
                from.read_state(s, comm.rank());
        return values;
    });
    try {
        agree_on_outcome(comm, mine, text, "resume");
    } catch (data_error const&) {  // some ranks hold the new values, some a mixture: no rank may continue
        comm.fail(std::current_exception());
        throw;
    }
    if constexpr (requires { trainer.model().stepped(std::size_t{}); })
        run_code_of_user(trainer, [&] {
            for (std::size_t i = 0, n = trainer.model().parameters().size(); i < n; ++i) trainer.model().stepped(i);
        });
    bool progresses = false;
    if constexpr (requires { trainer.set_progress(trainer.progress()); }) {
        progresses = from.manifest().progress.has_value();
        if (progresses) trainer.set_progress(*from.manifest().progress);
    }
    if (!progresses) trainer.set_completed_steps(from.manifest().step);
    if (from.manifest().settings) {
        if constexpr (ChangeableTrainer<C>) trainer.set_rate_factor(from.manifest().settings->rate_factor);
        if constexpr (FreezableTrainer<C>) trainer.set_frozen(frozen);
    }
    if (batches == nullptr && from.manifest().sampler && comm.rank() == 0)
        say_of_checkpoint(
            from.path() +
            ": holds a sampler's position, which is not used: pass the sampler to resume() to continue there");
    if (batches != nullptr) batches->seek(from.manifest().sampler->epoch, from.manifest().sampler->position);
    std::string const written = from.path() + ": was written by " + std::to_string(from.manifest().ranks) +
                                (from.manifest().ranks == 1 ? " rank: " : " ranks: ");
    if (!as_many && from.has_rank_state() && comm.rank() == 0)
        say_of_checkpoint(written + "state that each rank has for itself begins at zero");
    if (missing && comm.rank() == 0)
        say_of_checkpoint(from.path() +
                          ": was written with another bucket plan: state of the exchange that it does not have for "
                          "this one begins at zero");
    if constexpr (requires { trainer.settings_in_words(); })
        if (comm.rank() == 0)
            if (std::string const other = other_settings(
                    from.manifest().words, run_code_of_user(trainer, [&] { return trainer.settings_in_words(); }));
                !other.empty())
                say_of_checkpoint(from.path() + ": the training continues with other settings:" + other);
    if constexpr (requires { trainer.buffers_alike(); })
        if (!as_many && from.has_rank_buffers() && !trainer.buffers_alike() && comm.rank() == 0)
            say_of_checkpoint(written + "buffers that each rank has for itself begin as rank 0's");
}

}  // namespace ddp::detail
