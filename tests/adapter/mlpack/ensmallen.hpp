/// \file
/// What mlpack's FFN names of ensmallen where nobody calls its Train(): for tests where ensmallen itself is not there.
#pragma once

namespace ens {

class RMSProp;
class GridSearch;

namespace traits {
template <class Optimizer, class = void>
struct HasMaxIterationsSignature {
    static constexpr bool value = false;
};
}  // namespace traits

}  // namespace ens
