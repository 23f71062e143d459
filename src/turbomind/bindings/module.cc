// ④ The Python boundary: everything before and after token ids is Python, everything in between is
// C++. Mirrors lmdeploy/_turbomind.pyi. The GIL is released around every call that may take long or
// that needs the engine thread. One engine-side thread takes the GIL to call token masks. The
// thread that destroys a mask also takes it: a thread that waits for outputs, or the engine thread
// as it ends.

#include <pybind11/pybind11.h>

#include "turbomind/bindings/bindings.h"
#include "turbomind/core/check.h"

namespace py = pybind11;

PYBIND11_MODULE(_turbomind, m) {
  using namespace turbomind;
  m.doc() = "The C++ engine of lmdeploy.";
  py::register_exception<InvalidArgument>(m, "InvalidArgument", PyExc_ValueError);
  py::register_exception<InternalError>(m, "InternalError", PyExc_RuntimeError);
  DefDevices(m);  // the defaults of the next ones use DeviceCapability
  DefKvFormats(m);
  DefConfigs(m);
  DefWeights(m);
  DefRequest(m);
  DefKv(m);
  DefEngine(m);
  DefCodecs(m);
  DefContiguousCache(m);
  DefProfile(m);
}
