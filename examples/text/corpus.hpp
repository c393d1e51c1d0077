// A text as numbers, one a character, and windows of it as batches.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ddp/data/batch.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

struct corpus {
    std::string kinds;               // the distinct characters, in order; ids count from 0
    std::vector<std::uint32_t> ids;  // of the whole text
    std::size_t held_out = 0;        // characters at its end that nothing is trained on

    [[nodiscard]] std::span<std::uint32_t const> training() const {
        return std::span(ids).first(ids.size() - held_out);
    }
    [[nodiscard]] std::span<std::uint32_t const> unseen() const { return std::span(ids).last(held_out); }

    // What a character of the unseen part costs, in nats, if all that is known is how often each occurs in the rest.
    [[nodiscard]] double unigram_loss() const {
        std::vector<double> count(kinds.size(), 1);  // one more of each: nothing is impossible
        for (std::uint32_t const id : training()) count[id] += 1;
        double const total = static_cast<double>(training().size() + kinds.size());
        double sum = 0;
        for (std::uint32_t const id : unseen()) sum -= std::log(count[id] / total);
        return sum / static_cast<double>(held_out);
    }
};

// A file, or all files of a directory, in the order of their names; not what links point to, or a text would come
// twice. Control characters but for the line's end become blanks: what the model learns to write goes to a terminal.
inline corpus read_corpus(std::filesystem::path const& path, std::size_t time) {
    std::vector<std::filesystem::path> files{path};
    if (std::filesystem::is_directory(path)) {
        files.clear();
        for (auto const& entry : std::filesystem::directory_iterator(path))
            if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path());
        std::sort(files.begin(), files.end());
    }
    std::string text;
    for (auto const& file : files) {
        if (!std::filesystem::is_regular_file(file))  // a pipe may never have a writer, a device never ends
            throw std::runtime_error(file.string() +
                                     " is not a regular file: give --text a file or a directory of texts");
        std::ifstream in(file, std::ios::binary);
        text.append(std::istreambuf_iterator<char>(in), {});
        if (!in)
            throw std::runtime_error(file.string() + " cannot be read: give --text a file or a directory of texts");
    }
    for (char& c : text)
        if (static_cast<unsigned char>(c) < ' ' && c != '\n') c = ' ';

    corpus all{.kinds = text, .ids = {}, .held_out = text.size() / 10};
    if (all.held_out <= time)
        throw std::runtime_error(path.string() + " holds " + std::to_string(text.size()) +
                                 " characters: a tenth of them is held out, which must be more than --time, " +
                                 std::to_string(time));
    std::sort(all.kinds.begin(), all.kinds.end());
    all.kinds.erase(std::unique(all.kinds.begin(), all.kinds.end()), all.kinds.end());
    for (char const c : text) all.ids.push_back(static_cast<std::uint32_t>(all.kinds.find(c)));
    return all;
}

// Windows of `time` characters that begin `stride` apart, each with the character that follows each, as batches whose
// rows are characters. Allocates for the largest batch, once.
class windows {
public:
    windows(std::span<std::uint32_t const> ids, std::size_t time, std::size_t stride)
        : ids_(ids), time_(time), stride_(stride) {}

    [[nodiscard]] std::size_t size() const noexcept { return (ids_.size() - time_ - 1) / stride_ + 1; }

    [[nodiscard]] ddp::classification_batch<float> operator()(std::span<std::uint32_t const> numbers) {
        inputs_.clear();
        labels_.clear();
        for (std::uint32_t const number : numbers) {
            auto const window = ids_.subspan(number * stride_, time_ + 1);
            for (std::uint32_t const id : window.first(time_)) inputs_.push_back(static_cast<float>(id));
            labels_.insert(labels_.end(), window.begin() + 1, window.end());
        }
        return {.inputs = inputs_, .labels = labels_, .rows = labels_.size(), .features = 1};
    }

private:
    std::span<std::uint32_t const> ids_;
    std::size_t time_, stride_;
    std::vector<float> inputs_;          // (windows * time)
    std::vector<std::uint32_t> labels_;  // (windows * time)
};
