// ④ The Python boundary: everything before and after token ids is Python, everything in between is
// C++. Mirrors lmdeploy/_turbomind.pyi. The GIL is released around every call that may take long or
// that needs the engine thread. One engine-side thread takes the GIL to call token masks. The
// thread that destroys a mask also takes it: a thread that waits for outputs, or the engine thread
// as it ends.

#include <pybind11/pybind11.h>

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "turbomind/bindings/bindings.h"
#include "turbomind/core/check.h"

namespace py = pybind11;

namespace turbomind {
namespace {

// InvalidArgument in Python has the attributes of OptionError, `field` and `reason`.
void DefInvalidArgument(py::module_& m) {
  static py::handle type;  // the module keeps it alive
  type = py::exception<InvalidArgument>(m, "InvalidArgument", PyExc_ValueError).release();
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(std::move(thrown));
    } catch (const InvalidArgument& error) {
      const py::object made = type(error.what());
      const std::string field = error.field();
      made.attr("field") = field;
      made.attr("reason") = error.what() + (field.empty() ? 0 : field.size() + 1);
      PyErr_SetObject(type.ptr(), made.ptr());
    }
  });
}

}  // namespace
}  // namespace turbomind

PYBIND11_MODULE(_turbomind, m) {
  using namespace turbomind;
  m.doc() = "The C++ engine of lmdeploy.";
  DefInvalidArgument(m);
  py::register_exception<InternalError>(m, "InternalError", PyExc_RuntimeError);
  // Otherwise the message would be "std::bad_alloc".
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(std::move(thrown));
    } catch (const std::bad_alloc& error) {
      const bool is_bare = std::string(error.what()) == std::bad_alloc().what();
      PyErr_SetString(PyExc_MemoryError,
                      is_bare ? "The system has too little free memory. Close other programs, use "
                                "fewer bits (--weight-format, --quant-policy), or raise the limit "
                                "of the process (ulimit -v)."
                              : error.what());
    }
  });
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
