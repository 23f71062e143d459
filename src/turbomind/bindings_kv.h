#pragma once

#include <pybind11/pybind11.h>

#include "turbomind/engine/engine.h"

namespace turbomind {

// Formats and qualities of the cache as properties of EngineConfig.
void DefKvOptions(pybind11::class_<EngineConfig>& config);
// MemoryPlan, EngineStats and sequence_bytes.
void DefKv(pybind11::module_& m);
// Arrays by name (_turbomind.pyi).
pybind11::dict ToDict(const KvStatistics& statistics);

}  // namespace turbomind
