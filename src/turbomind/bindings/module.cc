// ④ The boundary: everything before and after token ids is Python, everything between is C++.
// Mirrors lmdeploy/_turbomind.pyi. The GIL is released around every call that may take long or
// that needs the engine thread. A thread of the engine's takes it to call token masks, one that
// waits for outputs (or the engine's, as it ends) to destroy them.

#include <pybind11/pybind11.h>

#include "turbomind/bindings/bindings.h"
#include "turbomind/core/check.h"

namespace py = pybind11;

PYBIND11_MODULE(_turbomind, m) {
  using namespace turbomind;
  m.doc() = "The C++ engine of lmdeploy.";
  py::register_exception<InvalidArgument>(m, "InvalidArgument", PyExc_ValueError);
  py::register_exception<InternalError>(m, "InternalError", PyExc_RuntimeError);
  DefConfigs(m);
  DefDevices(m);
  DefWeights(m);
  DefRequest(m);
  DefKv(m);
  DefEngine(m);
  DefCodecs(m);
  DefProfile(m);
}
