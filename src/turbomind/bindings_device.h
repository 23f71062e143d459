#pragma once

#include <pybind11/pybind11.h>

namespace turbomind {

// Devices: what there is, and how one is made.
void DefDevices(pybind11::module_& m);

}  // namespace turbomind
