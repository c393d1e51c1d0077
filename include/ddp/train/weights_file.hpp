/// \file
/// weights_file: the parameters and buffers of one model in a safetensors file; without ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/text.hpp>
#include <ddp/core/version.hpp>
#include <ddp/data/safetensors.hpp>
#include <ddp/model/model.hpp>

namespace ddp {

/// How the names and types in a file may differ from those of the model. The tensor with the name `file_prefix` + n in
/// the file corresponds to the tensor with the name `model_prefix` + n in the model, for every n. Names without these
/// prefixes have no counterpart.
struct load_options {
    bool strict = true;              ///< false: tensors without counterpart are listed in the report, and not an error
    bool cast = false;               ///< true: float and double are converted into each other
    std::string file_prefix = {};    ///< for example "module.", which PyTorch's DistributedDataParallel adds
    std::string model_prefix = {};   ///< for example "backbone.", to load a part of the model
    safetensors_limits limits = {};  ///< for the header of the file
};

/// What load_weights_as has done with the names, like the result of PyTorch's load_state_dict. Each list is in ascending
/// order.
struct load_report {
    std::vector<std::string> missing;     ///< in the model but not in the file: unchanged
    std::vector<std::string> unexpected;  ///< in the file but not in the model: not read
    std::vector<std::string> converted;   ///< in the model: converted from the type in the file
    string_map metadata;                  ///< the metadata of the file
};

namespace detail {

/// A place in a model that is kept in a file.
struct kept_tensor {
    std::string name;
    element_type type;
    std::vector<std::size_t> shape;
    std::vector<std::size_t> strides;  // empty: row-major
    mutable_bytes bytes;
};

/// Parameters, then buffers, as the model lists them now.
template <Model M>
std::vector<kept_tensor> kept_tensors(M& model) {
    std::vector<kept_tensor> all;
    for (parameter<element_of<M>> const& p : model.parameters())
        all.push_back({p.name, element_type_of<element_of<M>>(), p.shape, p.strides, as_mutable_bytes(p.value)});
    if constexpr (requires { model.buffers(); })
        for (model_buffer const& b : model.buffers()) all.push_back({b.name, b.type, b.shape, {}, b.bytes});
    std::vector<std::string_view> names;
    for (kept_tensor const& t : all) names.push_back(t.name);
    std::sort(names.begin(), names.end());
    auto const twice = std::adjacent_find(names.begin(), names.end());
    DDP_EXPECTS(twice == names.end(),
                "the model lists " + in_quotes(*twice) + " twice: names of parameters and buffers are unique");
    for (kept_tensor const& t : all) {
        DDP_EXPECTS(bytes_of_tensor(t.type, t.shape) == t.bytes.size(),
                    "the model lists " + in_quotes(t.name) + " as " + type_and_shape(t.type, t.shape) + ", but with " +
                        std::to_string(t.bytes.size()) + " bytes of memory");
        std::size_t last = 0;  // element that the strides lead to
        for (std::size_t d = 0; d < std::min(t.shape.size(), t.strides.size()); ++d)
            last += t.shape[d] == 0 ? 0 : (t.shape[d] - 1) * t.strides[d];
        DDP_EXPECTS(
            t.strides.empty() || t.bytes.empty() ||
                (t.strides.size() == t.shape.size() && last < t.bytes.size() * 8 / bits_of(t.type)),
            "the strides of " + in_quotes(t.name) + " point outside its memory, or there is not one per dimension");
        std::vector<std::pair<std::size_t, std::size_t>> steps;  // stride, extent
        for (std::size_t d = 0; d < t.strides.size(); ++d)
            if (t.shape[d] > 1) steps.emplace_back(t.strides[d], t.shape[d]);
        std::sort(steps.begin(), steps.end());
        std::size_t dense = 1;
        for (auto const& [stride, extent] : steps) {
            DDP_EXPECTS(t.bytes.empty() || stride == dense,
                        "the strides of " + in_quotes(t.name) + " visit an element twice: its memory must be dense");
            dense *= extent;
        }
    }
    return all;
}

/// Calls f(k, at) for every element in row-major order: the k-th lies `at` elements into the memory.
template <class F>
void in_row_major_order(kept_tensor const& t, F&& f) {
    std::vector<std::size_t> index(t.shape.size());
    std::size_t const count = t.bytes.size() * 8 / bits_of(t.type);
    for (std::size_t k = 0, at = 0; k < count; ++k) {
        f(k, at);
        for (std::size_t d = index.size(); d-- > 0;) {
            at += t.strides[d];
            if (++index[d] < t.shape[d]) break;
            at -= t.strides[d] * std::exchange(index[d], 0);
        }
    }
}

/// The tensors as they are written, row-major. Those that are not row-major in memory are copied into `rearranged`.
inline std::vector<tensor_view> views_of(std::vector<kept_tensor> const& kept,
                                         std::vector<std::vector<std::byte>>& rearranged) {
    std::vector<tensor_view> views;
    for (kept_tensor const& t : kept) {
        views.push_back({t.name, t.type, t.shape, t.bytes});
        if (t.strides.empty()) continue;
        std::size_t const size = bits_of(t.type) / 8;
        std::vector<std::byte>& copy = rearranged.emplace_back(t.bytes.size());
        in_row_major_order(t, [&](std::size_t k, std::size_t at) {
            std::memcpy(copy.data() + k * size, t.bytes.data() + at * size, size);
        });
        views.back().bytes = copy;
    }
    return views;
}

template <Model M>
void write_weights(M& model, std::string const& path, string_map metadata) {
    metadata.emplace("ddp.version", std::to_string(version_major) + "." + std::to_string(version_minor) + "." +
                                        std::to_string(version_patch));
    std::vector<kept_tensor> const kept = kept_tensors(model);
    std::vector<std::vector<std::byte>> rearranged;
    std::vector<tensor_view> const views = views_of(kept, rearranged);
    write_safetensors(path, views, metadata);
}

/// Reads a tensor of a file and adds it to `all`; with `into_model`, stores it in the model. Cost: one pass, and memory
/// in `aside` for one piece (for all of a tensor that has strides).
inline void read_kept(safetensors_file const& file, tensor_info const& t, kept_tensor const& own, bool into_model,
                      std::vector<std::byte>& aside, digest& all) {
    constexpr std::size_t piece = std::size_t{1} << 20;
    bool const straight = into_model && own.strides.empty();
    std::size_t const size = own.bytes.size();
    if (!straight) aside.resize(std::max(aside.size(), into_model ? size : std::min(size, piece)));
    for (std::size_t at = 0; at < size; at += piece) {
        std::size_t const count = std::min(piece, size - at);
        mutable_bytes const to = straight     ? own.bytes.subspan(at, count)
                                 : into_model ? mutable_bytes(aside).subspan(at, count)
                                              : mutable_bytes(aside).first(count);
        file.read(t, at, to);
        all.add(to);
    }
    if (into_model && !straight) {
        std::size_t const element = bits_of(own.type) / 8;
        in_row_major_order(own, [&](std::size_t k, std::size_t to) {
            std::memcpy(own.bytes.data() + to * element, aside.data() + k * element, element);
        });
    }
}

/// As read_kept, for a tensor of float in the file and double in the model, or the other way round. Throws data_error
/// (errc::format) for a number that is too large to be a float. Cost: one pass, and memory in `aside` for the file's tensor.
template <class From, class To>
void read_converted(safetensors_file const& file, tensor_info const& t, kept_tensor const& own, bool into_model,
                    std::vector<std::byte>& aside, digest& all) {
    std::size_t const count = own.bytes.size() / sizeof(To);
    aside.resize(std::max(aside.size(), count * sizeof(From)));
    mutable_bytes const from = mutable_bytes(aside).first(count * sizeof(From));
    file.read(t, 0, from);
    all.add(from);
    auto const put = [&](std::size_t k, std::size_t at) {
        From number{};
        std::memcpy(&number, from.data() + k * sizeof(From), sizeof(From));
        if constexpr (sizeof(To) < sizeof(From)) {
            From const most = From(std::numeric_limits<To>::max());
            if (is_finite(number) && (number > most || number < -most))
                throw data_error(errc::format,
                                 concat({file.name(), ": tensor ", in_quotes(t.name), ": element ", k, " of its ",
                                         count, " is too large for a float; load it into a model of double"}));
        }
        To const as = static_cast<To>(number);
        if (into_model) std::memcpy(own.bytes.data() + at * sizeof(To), &as, sizeof(To));
    };
    if (own.strides.empty())
        for (std::size_t k = 0; k < count; ++k) put(k, k);
    else
        in_row_major_order(own, put);
}

/// A file whose tensors are those of a model: same names, types and shapes, except for differences that the options
/// allow.
class weights_file {
public:
    /// Throws data_error, with all differences, unless they are.
    template <Model M>
    weights_file(M& model, std::string const& path, load_options const& options)
        : file_(path, options.limits), model_(kept_tensors(model)) {
        std::vector<kept_tensor const*> wanted;  // by name
        for (kept_tensor const& t : model_) wanted.push_back(&t);
        std::sort(wanted.begin(), wanted.end(), [](auto const* a, auto const* b) { return a->name < b->name; });
        std::vector<bool> found_in_file(wanted.size(), false);
        auto const index_of = [&](std::string_view name) {
            auto const at = std::lower_bound(wanted.begin(), wanted.end(), name,
                                             [](auto const* t, std::string_view n) { return t->name < n; });
            bool const there = at != wanted.end() && (*at)->name == name;
            return there ? static_cast<std::size_t>(at - wanted.begin()) : wanted.size();
        };
        constexpr std::size_t shown = 1000;
        std::size_t differences = 0;
        std::string text = path + ": holds the weights of another model:";
        auto const differs = [&](std::string_view name, std::string const& in_file, std::string const& in_model) {
            if (++differences <= shown)
                text += "\n  tensor " + in_quotes(name) + ": " + in_file + "in the file, " + in_model + "in the model";
        };
        auto const is_float = [](element_type type) { return type == element_type::f32 || type == element_type::f64; };
        std::size_t loaded = 0;
        for (tensor_info const& t : file_.tensors()) {
            std::size_t const found = t.name.starts_with(options.file_prefix)
                                          ? index_of(options.model_prefix + t.name.substr(options.file_prefix.size()))
                                          : wanted.size();
            if (found == wanted.size()) {
                if (options.strict) differs(t.name, type_and_shape(t.type, t.shape) + " ", "not ");
                report_.unexpected.push_back(t.name);
                places_.push_back(nullptr);
                continue;
            }
            kept_tensor const& own = *wanted[found];
            bool const converts = options.cast && own.type != t.type && is_float(own.type) && is_float(t.type);
            if ((own.type != t.type && !converts) || own.shape != t.shape)
                differs(t.name, type_and_shape(t.type, t.shape) + " ", type_and_shape(own.type, own.shape) + " ");
            if (converts) report_.converted.push_back(own.name);
            places_.push_back(&own);
            found_in_file[found] = true;
            ++loaded;
        }
        for (kept_tensor const& t : model_)
            if (!found_in_file[index_of(t.name)]) {
                if (options.strict) differs(t.name, "not ", type_and_shape(t.type, t.shape) + " ");
                report_.missing.push_back(t.name);
            }
        for (auto* const names : {&report_.missing, &report_.unexpected, &report_.converted})
            std::sort(names->begin(), names->end());
        if (!options.strict && loaded == 0 && !model_.empty())
            throw data_error(errc::format,
                             concat({path, ": holds no tensor of the model. It has ",
                                     file_.tensors().empty() ? std::string("none") : in_quotes(file_.tensors()[0].name),
                                     file_.tensors().size() > 1 ? " and others" : "", ", the model ",
                                     in_quotes(model_[0].name), "; look at file_prefix and model_prefix"}));
        if (differences == 0) return;
        if (differences > shown) text += "\n  and " + std::to_string(differences - shown) + " more";
        throw data_error(errc::format, text);
    }

    [[nodiscard]] std::string const& name() const noexcept { return file_.name(); }
    [[nodiscard]] string_map const& metadata() const noexcept { return file_.metadata(); }
    [[nodiscard]] load_report report() const {
        load_report all = report_;
        all.metadata = file_.metadata();
        return all;
    }

    /// Reads all tensors that the model has, and returns their digest; with `into_model`, stores them in the model.
    /// Cost: one pass over the file, and memory for one piece (for a whole tensor where it has strides).
    [[nodiscard]] std::uint64_t read(bool into_model) const {
        digest all;
        for (auto const& [key, value] : file_.metadata()) all.add(key).add(value);
        std::vector<std::byte> aside;
        for (std::size_t i = 0; i < file_.tensors().size(); ++i) {
            tensor_info const& t = file_.tensors()[i];
            all.add(t.name);
            if (places_[i] == nullptr) continue;
            kept_tensor const& own = *places_[i];
            all.add(own.name);
            if (own.type == t.type)
                read_kept(file_, t, own, into_model, aside, all);
            else if (own.type == element_type::f32)
                read_converted<double, float>(file_, t, own, into_model, aside, all);
            else
                read_converted<float, double>(file_, t, own, into_model, aside, all);
        }
        return all.value();
    }

private:
    safetensors_file file_;
    std::vector<kept_tensor> model_;
    std::vector<kept_tensor const*> places_;  // places_[i]: where the file's tensor i goes; null: nowhere
    load_report report_;
};

/// The text of an error without the code that its constructor puts before it.
[[nodiscard]] inline std::string text_of(error const& e) {
    return std::string(e.what()).substr(std::strlen(error(e.code(), "").what()));
}

/// Second pass over a file whose first pass succeeded with the digest `before`.
template <Model M>
std::uint64_t put_in_place(M& model, weights_file const& file, std::uint64_t before) {
    constexpr char const* worse = "; what the model holds now is a mixture: load again";
    std::uint64_t now = 0;
    try {
        now = file.read(true);
    } catch (data_error const& e) {
        throw data_error(e.code(), text_of(e) + worse);
    }
    if (now != before) throw data_error(errc::file, file.name() + ": was overwritten while it was read" + worse);
    if constexpr (requires { model.stepped(std::size_t{}); })
        for (std::size_t i = 0, n = model.parameters().size(); i < n; ++i) model.stepped(i);
    return now;
}

}  // namespace detail

/// Saves a model's parameters and buffers in a safetensors file, for programs without ranks. The file is written in full
/// or not at all. `metadata`: texts to store in the file besides "ddp.version".
///
/// Throws  data_error (errc::file) if the file cannot be written; what was at `path` before is then unchanged.
///         usage_error for names that are not unique or not UTF-8.
template <Model M>
void save_weights(M& model, std::string const& path, string_map metadata = {}) {
    detail::write_weights(model, path, std::move(metadata));
}

/// Loads a model's parameters and buffers from a safetensors file, for programs without ranks, and returns the metadata
/// of the file. The file is read twice: first to check that all of it can be read, then directly into the model.
///
/// Throws  data_error: errc::file if the file is missing or cannot be read; errc::format if it violates the format, or if
///         its names, types or shapes are not those of the model (with all differences, up to 1,000). The model
///         is then unchanged, unless the disk fails or the file is overwritten in place between the two passes.
template <Model M>
string_map load_weights(M& model, std::string const& path, safetensors_limits const& limits = {}) {
    detail::weights_file const file(model, path, {.limits = limits});
    (void)detail::put_in_place(model, file, file.read(false));
    return file.metadata();
}

/// Like load_weights for programs without ranks, from a file whose names and types may differ from those of the model:
///
///     auto const report =
///         ddp::load_weights_as(model, "of_pytorch.safetensors", {.strict = false, .file_prefix = "module."});
///     for (std::string const& name : report.missing) std::puts(name.c_str());  // unchanged
///
/// Throws  like load_weights. Always an error: a different shape; a different type, unless `cast` converts it; a
///         finite number that is too large for a float; and, if not `strict`, a file without any tensor of the model.
template <Model M>
load_report load_weights_as(M& model, std::string const& path, load_options const& options) {
    detail::weights_file const file(model, path, options);
    (void)detail::put_in_place(model, file, file.read(false));
    return file.report();
}

}  // namespace ddp
