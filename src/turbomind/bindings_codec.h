#pragma once

#include <pybind11/pybind11.h>

namespace turbomind {

// Adds encode_rows and decode_rows: the codecs over NumPy arrays, for tests and reports.
void DefCodecs(pybind11::module_& module);

}  // namespace turbomind
