// Binds the table of KV formats.

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "turbomind/bindings/bindings.h"
#include "turbomind/bindings/enums.h"

namespace py = pybind11;

namespace turbomind {
namespace {

py::tuple Aliases(const KvFormatInfo& row) {
  py::list aliases;
  for (const char* alias : row.aliases) {
    if (alias != nullptr) {
      aliases.append(alias);
    }
  }
  return py::tuple(aliases);
}

py::tuple Rows() {
  py::list rows;
  for (const KvFormatInfo& row : kKvFormats) {
    rows.append(py::cast(&row, py::return_value_policy::reference));
  }
  return py::tuple(rows);
}

// Converts a user's quant_policy to an int or a string.
template <class F>
auto WithPolicy(const py::object& value, F fn) {
  if (py::isinstance<py::str>(value)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
    if (text == nullptr) {
      PyErr_Clear();
      RefuseQuantPolicy("text that is not valid Unicode");
    }
    return fn(std::string_view(text, static_cast<size_t>(size)));
  }
  if (py::isinstance<py::bool_>(value) || !py::isinstance<py::int_>(value)) {
    RefuseQuantPolicy(std::string("of type ") + Py_TYPE(value.ptr())->tp_name);
  }
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow != 0 || number < INT32_MIN || number > INT32_MAX) {
    RefuseQuantPolicy("an integer of more than 32 bits");
  }
  return fn(static_cast<int>(number));
}

struct Resolver {
  const DeviceCapability& device;
  bool strict_arch;

  KvCacheMode operator()(int policy) const { return GetKvCacheMode(policy, device); }
  KvCacheMode operator()(std::string_view name) const {
    return GetKvCacheMode(name, device, strict_arch);
  }
};

}  // namespace

void DefKvFormats(py::module_& m) {
  py::native_enum<KvCacheMode> formats(m, "KvFormat", "enum.Enum");
  for (const KvCacheMode format : kAllKvCacheModes) {
    formats.value(ToString(format), format);
  }
  formats.finalize();
  py::class_<KvFormatInfo>(m, "KvFormatInfo")
      .def_property_readonly("format",
                             [](const KvFormatInfo& self) {
                               return self.device_chooses ? std::nullopt
                                                          : std::optional(self.format);
                             })
      .def_readonly("name", &KvFormatInfo::name)
      .def_property_readonly("aliases", &Aliases)
      .def_property_readonly("quant_policy",
                             [](const KvFormatInfo& self) {
                               return self.quant_policy < 0 ? std::nullopt
                                                            : std::optional(self.quant_policy);
                             })
      .def_readonly("bits", &KvFormatInfo::bits)
      .def_readonly("group", &KvFormatInfo::group)
      .def_property_readonly("is_fp4", [](const KvFormatInfo& self) { return IsFp4(self.format); })
      .def_readonly("has_global_scale", &KvFormatInfo::has_global_scale)
      .def_readonly("max_value", &KvFormatInfo::max_value)
      .def_readonly("description", &KvFormatInfo::description);
  m.def("kv_formats", &Rows);
  m.def(
      "parse_kv_format",
      [](const py::object& value) {
        return WithPolicy(value, [](auto policy) { return ParseKvFormat(policy).name; });
      },
      py::arg("value"));
  m.def(
      "get_kv_cache_mode",
      [](const py::object& policy, const DeviceCapability& device, bool strict_arch) {
        return WithPolicy(policy, Resolver{device, strict_arch});
      },
      py::arg("quant_policy"), py::arg("capability") = DeviceCapability(),
      py::arg("strict_arch") = false);
  m.def(
      "require_listed_pair",
      [](const py::object& k, const py::object& v) {
        RequireListedPair(ToKvFormat("k", k), ToKvFormat("v", v));
      },
      py::arg("k"), py::arg("v"));
}

}  // namespace turbomind
