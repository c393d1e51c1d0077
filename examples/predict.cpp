// Classifies images with weights that fashion_mnist has saved, in one process and without ranks.
//
//     ./fashion_mnist --ranks 2 --save fashion.safetensors
//     ./predict --load fashion.safetensors
// Prints a line for each of the first images, such as "    0  Ankle boot   0.998", with the truth where it is another,
// and last "accuracy 0.89… on 10000 images".
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ddp/data/gzip.hpp>
#include <ddp/ddp.hpp>
#include <ddp/train/weights_file.hpp>
#include <exception>
#include <numeric>
#include <string>
#include <vector>

#include "fashion_models.hpp"
#include "options.hpp"

namespace {

constexpr std::array<char const*, 10> names = {"T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
                                               "Sandal",      "Shirt",   "Sneaker",  "Bag",   "Ankle boot"};

// What the file says about itself. It comes from outside: the first layer must be as large as the tensor that the file
// really holds for it, so that a short file cannot ask for a large network.
fashion_model model_of(std::string const& path, ddp::classification_data const& images) {
    ddp::safetensors_file const file(path);
    ddp::string_map const& said = file.metadata();
    std::string const hidden = said.get("hidden");
    std::size_t units = 0;
    auto const [end, bad] = std::from_chars(hidden.data(), hidden.data() + hidden.size(), units);
    if (said.get("model").empty() || bad != std::errc{} || end != hidden.data() + hidden.size())
        throw std::invalid_argument(path + " does not say which model it holds: give a file of fashion_mnist --save");
    if (said.get("model") == "mlp") {
        std::vector<std::size_t> const shape{units, images.features};
        if (std::none_of(file.tensors().begin(), file.tensors().end(), [&](ddp::tensor_info const& t) {
                return t.name == "0.weight" && t.type == ddp::element_type::f32 && t.shape == shape;
            }))
            throw std::invalid_argument(path + " says that it holds " + hidden + " hidden units for images of " +
                                        std::to_string(images.features) +
                                        " pixels, but no such tensor 0.weight: it is damaged, or of other data");
    }
    return make_model(said.get("model"), images.sample_shape, units);
}

// What softmax makes of the model's outputs.
std::array<double, 10> probabilities(fashion_model& model, ddp::classification_batch<float> const& image) {
    auto const z = model.predict(image);  // (1, 10)
    std::array<double, 10> all{};
    double total = 0;
    for (std::size_t k = 0; k < all.size(); ++k)
        total += all[k] = std::exp(z(0, static_cast<Eigen::Index>(k)) - z.maxCoeff());
    for (double& each : all) each /= total;
    return all;
}

void predict(std::string const& path, std::string const& directory, std::size_t count) {
    auto const images = ddp::load_idx_classification<ddp::gzip_source>(directory, ddp::data_split::test);
    fashion_model model = model_of(path, images);
    ddp::load_weights(model, path);

    ddp::batch_loader<float> load(images);
    std::vector<std::uint32_t> numbers(images.size());
    std::iota(numbers.begin(), numbers.end(), 0u);
    for (std::uint32_t const& i : std::span(numbers).first(std::min(count, images.size()))) {
        auto const all = probabilities(model, load({&i, 1}));
        auto const best = static_cast<std::size_t>(std::max_element(all.begin(), all.end()) - all.begin());
        std::string const truth = best == images.labels[i] ? "" : std::string("  is: ") + names[images.labels[i]];
        std::printf("%5u  %-11s  %.3f%s\n", i, names[best], all[best], truth.c_str());
    }
    ddp::nn::evaluation sums;
    for (std::size_t at = 0; at < numbers.size(); at += 500)
        sums += model.evaluate(load(std::span(numbers).subspan(at, std::min<std::size_t>(500, numbers.size() - at))));
    std::printf("accuracy %.4f on %zu images\n", sums.accuracy(), images.size());
}

}  // namespace

int main(int argc, char** argv) {
    std::string load, data = "/usr/share/datasets/fashion-mnist";
    std::size_t count = 10;
    options("Classifies the test images of Fashion-MNIST with weights that fashion_mnist --save has written.")
        .add("load", load, "the .safetensors file; it says itself which model it holds")
        .add("data", data, "directory with IDX files, plain or gzipped")
        .add("count", count, "how many images to print a line for")
        .parse(argc, argv);
    if (load.empty()) {
        std::fprintf(stderr, "--load is missing: which weights?\nTry --help.\n");
        return 2;
    }
    try {
        predict(load, data, count);
        return EXIT_SUCCESS;
    } catch (std::exception const& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return EXIT_FAILURE;
    }
}
