#pragma once

#include <array>
#include <cstdint>

namespace turbomind {

// Separates prefix caches. Sequences share blocks only if their salts are equal. Zero is the
// default.
using CacheSalt = std::array<uint64_t, 2>;

}  // namespace turbomind
