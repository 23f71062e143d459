#pragma once

// The parts of the Python module _turbomind. Each Def function adds one part to the module.

#include <pybind11/pybind11.h>

#include "turbomind/engine/engine.h"

namespace turbomind {

void DefConfigs(pybind11::module_& m);
void DefDevices(pybind11::module_& m);
void DefWeights(pybind11::module_& m);
void DefRequest(pybind11::module_& m);
// MemoryPlan, EngineStats, sequence_bytes and the names of formats.
void DefKv(pybind11::module_& m);
// The engine, and what is checked before there is one.
void DefEngine(pybind11::module_& m);
// encode_rows and decode_rows: the codecs over NumPy arrays, for tests and reports.
void DefCodecs(pybind11::module_& m);
// Profiling devices and their records. REQUIRES: Device is defined.
void DefProfile(pybind11::module_& m);

// Formats and qualities of the cache as properties of EngineConfig.
void DefKvOptions(pybind11::class_<EngineConfig>& config);
// Arrays by name (_turbomind.pyi).
pybind11::dict ToDict(const KvStatistics& statistics);

}  // namespace turbomind
