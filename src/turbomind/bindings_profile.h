#pragma once

#include <pybind11/pybind11.h>

namespace turbomind {

// Profiling devices, their records, and the machine's ceilings (_turbomind.pyi). REQUIRES: Device
// is defined.
void DefProfile(pybind11::module_& module);

}  // namespace turbomind
