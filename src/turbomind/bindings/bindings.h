#pragma once

// The parts of the Python module _turbomind. Each Def function adds one part to the module.

#include <pybind11/pybind11.h>

#include "turbomind/engine/engine.h"

namespace turbomind {

// Binds KvFormat, kv_formats and what parses, resolves and checks formats. Called first.
void DefKvFormats(pybind11::module_& m);
void DefConfigs(pybind11::module_& m);
void DefDevices(pybind11::module_& m);
void DefWeights(pybind11::module_& m);
void DefRequest(pybind11::module_& m);
// Binds MemoryPlan, EngineStats and sequence_bytes.
void DefKv(pybind11::module_& m);
// Binds the engine and the checks that need no engine.
void DefEngine(pybind11::module_& m);
// Binds encode_rows and decode_rows: the codecs over NumPy arrays, for tests and reports.
void DefCodecs(pybind11::module_& m);
// Binds the cache of other model loops (components/kv_cache). REQUIRES: Device is already defined.
void DefContiguousCache(pybind11::module_& m);
// Binds profiling devices and their records. REQUIRES: Device is already defined.
void DefProfile(pybind11::module_& m);

// Defines the KV formats and quality options as properties of EngineConfig.
void DefKvOptions(pybind11::class_<EngineConfig>& config);
// Throws InvalidArgument unless there are 16 bytes.
CacheSalt ToCacheSalt(const pybind11::bytes& bytes);
// Returns the statistics as arrays by name (_turbomind.pyi).
pybind11::dict ToDict(const KvStatistics& statistics);

}  // namespace turbomind
