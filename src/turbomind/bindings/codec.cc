// Binds the codecs over NumPy arrays.

#include <pybind11/numpy.h>

#include <algorithm>
#include <string>
#include <vector>

#include "turbomind/backend/cpu/cpu_codec_rows.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"
#include "turbomind/bindings/bindings.h"
#include "turbomind/bindings/enums.h"
#include "turbomind/core/check.h"

namespace py = pybind11;

namespace turbomind {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Returns the kernels of an instruction set that this machine can run; empty selects the best.
CpuKvKernels Kernels(const std::string& isa) {
  const std::vector<std::string> isas = AvailableCpuIsas();
  if (isa.empty()) {
    return CpuKvKernelsFor(isas.back());
  }
  std::string choices;
  for (const std::string& choice : isas) {
    choices += (choices.empty() ? "" : ", ") + choice;
  }
  if (std::find(isas.begin(), isas.end(), isa) == isas.end()) {
    throw InvalidArgument(
        "isa", "\"" + isa + "\" is not available on this machine. Use one of " + choices);
  }
  return CpuKvKernelsFor(isa);
}

struct RowShape {
  CodecRows rows;
  py::ssize_t payload_bytes = 0;
  py::ssize_t metadata_bytes = 0;
};

RowShape Shape(KvCacheMode format, const std::string& dtype, py::ssize_t num_rows,
               int64_t head_dim) {
  if (head_dim < 1 || head_dim > 65536) {
    throw InvalidArgument("head_dim",
                          "is " + std::to_string(head_dim) + ". It must be 1 to 65536.");
  }
  RowShape shape;
  shape.rows.format = format;
  shape.rows.dtype = Parse("dtype", kDataTypes, dtype);
  shape.rows.num_rows = num_rows;
  shape.rows.head_dim = static_cast<int>(head_dim);
  const int dim = shape.rows.head_dim;
  shape.payload_bytes = block::RowBytes(shape.rows.format, dim, shape.rows.dtype);
  shape.metadata_bytes = block::ParamBytes(shape.rows.format, shape.rows.dtype) +
                         block::ScaleBytes(shape.rows.format, dim);
  return shape;
}

py::tuple Encode(const py::object& format, const Array<float>& rows, const std::string& dtype,
                 float global_scale, const std::string& isa, bool search) {
  if (rows.ndim() != 2) {
    throw InvalidArgument(
        "rows", "has " + std::to_string(rows.ndim()) + " dimensions, but must be [n, head_dim].");
  }
  RowShape shape = Shape(ToKvFormat("format", format), dtype, rows.shape(0), rows.shape(1));
  shape.rows.global_scale = global_scale;
  shape.rows.search = search;
  const CpuKvKernels kernels = Kernels(isa);
  py::array_t<uint8_t> payload({rows.shape(0), shape.payload_bytes});
  py::array_t<uint8_t> metadata({rows.shape(0), shape.metadata_bytes});
  EncodeRows(kernels, shape.rows, rows.data(), payload.mutable_data(), metadata.mutable_data());
  return py::make_tuple(payload, metadata);
}

void RequireShape(const char* what, const Array<uint8_t>& array, py::ssize_t rows,
                  py::ssize_t cols) {
  if (array.ndim() != 2 || array.shape(0) != rows || array.shape(1) != cols) {
    throw InvalidArgument(what, "has " + std::to_string(array.size()) + " bytes in " +
                                    std::to_string(array.ndim()) + " dimensions, but must be [" +
                                    std::to_string(rows) + ", " + std::to_string(cols) + "]");
  }
}

struct DecodeOptions {
  KvCacheMode format;
  std::string dtype;
  float global_scale;
  std::string isa;
};

Array<float> Decode(const Array<uint8_t>& payload, const Array<uint8_t>& metadata, int64_t head_dim,
                    const DecodeOptions& options) {
  const py::ssize_t num_rows = payload.ndim() == 2 ? payload.shape(0) : 0;
  RowShape shape = Shape(options.format, options.dtype, num_rows, head_dim);
  shape.rows.global_scale = options.global_scale;
  RequireShape("payload", payload, num_rows, shape.payload_bytes);
  RequireShape("metadata", metadata, num_rows, shape.metadata_bytes);
  const CpuKvKernels kernels = Kernels(options.isa);
  Array<float> rows({num_rows, static_cast<py::ssize_t>(head_dim)});
  DecodeRows(kernels, shape.rows, payload.data(), metadata.data(), rows.mutable_data());
  return rows;
}

}  // namespace

void DefCodecs(py::module_& module) {
  module.def("encode_rows", &Encode, py::arg("format"), py::arg("rows"), py::arg("dtype"),
             py::arg("global_scale") = 1.f, py::arg("isa") = "", py::kw_only(),
             py::arg("search") = false);
  module.def(
      "decode_rows",
      [](const py::object& format, const Array<uint8_t>& payload, const Array<uint8_t>& metadata,
         int64_t head_dim, const std::string& dtype, float global_scale, const std::string& isa) {
        return Decode(payload, metadata, head_dim,
                      {ToKvFormat("format", format), dtype, global_scale, isa});
      },
      py::arg("format"), py::arg("payload"), py::arg("metadata"), py::arg("head_dim"),
      py::arg("dtype"), py::arg("global_scale") = 1.f, py::arg("isa") = "");
}

}  // namespace turbomind
