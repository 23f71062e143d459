// Binds ContiguousCache over NumPy arrays. lmdeploy/kv_cache checks the arguments of its users.
// Here they are checked once more, before they index memory.

#include "turbomind/bindings/bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kv_cache/contiguous_cache.h"
#include "turbomind/bindings/enums.h"
#include "turbomind/core/check.h"
#include "turbomind/profile/op_cost.h"

namespace py = pybind11;

namespace turbomind {
namespace {

using Cache = ContiguousCache;
using Floats = py::array_t<float, py::array::c_style>;
using Pair = std::pair<py::array, py::array>;  // K and V

// Returns the dtype of an array of native floats. uint16 holds the bits of BF16.
DataType DtypeOf(const py::array& array) {
  const py::dtype dtype = array.dtype();
  const bool is_native = dtype.byteorder() == '=';
  if (is_native && dtype.kind() == 'f' && dtype.itemsize() == 4) {
    return DataType::kFloat32;
  }
  if (is_native && dtype.kind() == 'f' && dtype.itemsize() == 2) {
    return DataType::kFloat16;
  }
  if (is_native && dtype.kind() == 'u' && dtype.itemsize() == 2) {
    return DataType::kBFloat16;
  }
  throw InvalidArgument("An array has dtype " + py::str(dtype).cast<std::string>() +
                        ". It must be float32, float16 or the bits of bfloat16.");
}

void RequireShape(const py::array& array, const std::vector<py::ssize_t>& shape) {
  if (!std::equal(array.shape(), array.shape() + array.ndim(), shape.begin(), shape.end())) {
    throw InvalidArgument("An array has " + std::to_string(array.size()) + " values in " +
                          std::to_string(array.ndim()) +
                          " dimensions, which do not fit the cache.");
  }
}

std::vector<py::ssize_t> ShapeOf(const Cache& cache, int heads, py::ssize_t num_tokens) {
  return {cache.config().batch_size, heads, num_tokens, cache.config().head_dim};
}

HeadRows ToRows(const Cache& cache, const py::array& array, int heads, py::ssize_t num_tokens) {
  RequireShape(array, ShapeOf(cache, heads, num_tokens));
  HeadRows rows = {static_cast<const std::byte*>(array.data()), DtypeOf(array), {}};
  std::copy_n(array.strides(), 4, rows.strides.begin());
  return rows;
}

NewRows ToNewRows(const Cache& cache, const Pair& kv) {
  const py::ssize_t num_tokens = kv.first.ndim() == 4 ? kv.first.shape(2) : 0;
  const int heads = cache.config().kv_heads;
  NewRows rows = {ToRows(cache, kv.first, heads, num_tokens),
                  ToRows(cache, kv.second, heads, num_tokens), 0};
  if (num_tokens > cache.config().max_seq_len) {
    throw InvalidArgument("k_new", "has " + std::to_string(num_tokens) +
                                       " tokens. At most max_seq_len, " +
                                       std::to_string(cache.config().max_seq_len) + ", fit.");
  }
  rows.num_tokens = static_cast<int>(num_tokens);
  return rows;
}

// Returns two new arrays for the positions [first, end).
std::pair<Floats, Floats> MakeDense(const Cache& cache, int first, int end) {
  const auto shape = ShapeOf(cache, cache.config().kv_heads, end - first);
  return {Floats(shape), Floats(shape)};
}

void Append(Cache& cache, int layer, const Pair& kv) {
  const NewRows rows = ToNewRows(cache, kv);
  const py::gil_scoped_release release;
  cache.Append(layer, rows);
}

// Stores K and V, and returns the decoded rows that the new tokens see.
std::pair<Floats, Floats> Update(Cache& cache, int layer, const Pair& kv) {
  const NewRows rows = ToNewRows(cache, kv);
  cache.RequireRoom(layer, rows.num_tokens);
  const int end = cache.seq_len() + rows.num_tokens;
  auto dense = MakeDense(cache, cache.FirstDense(end, rows.num_tokens), end);
  const DenseRows out = {dense.first.mutable_data(), dense.second.mutable_data()};
  const py::gil_scoped_release release;
  cache.Append(layer, rows, out);
  return dense;
}

std::pair<Floats, Floats> Read(Cache& cache, int layer) {
  auto dense = MakeDense(cache, cache.FirstDense(cache.seq_len(), 0), cache.seq_len());
  const DenseRows out = {dense.first.mutable_data(), dense.second.mutable_data()};
  const py::gil_scoped_release release;
  cache.Read(layer, out);
  return dense;
}

struct AttendOptions {
  float softmax_scale = 1.f;
  std::optional<Floats> sinks;
};

void Attend(Cache& cache, int layer, const Pair& q_and_out, const Pair& kv,
            const AttendOptions& options) {
  const NewRows rows = ToNewRows(cache, kv);
  const int heads = cache.config().q_heads;
  auto out = py::array(q_and_out.second);
  RequireShape(out, ShapeOf(cache, heads, rows.num_tokens));
  if ((out.flags() & py::array::c_style) == 0 || !out.writeable()) {
    throw InvalidArgument("The output must be contiguous and writeable.");
  }
  Queries queries = {.q = ToRows(cache, q_and_out.first, heads, rows.num_tokens),
                     .out = static_cast<std::byte*>(out.mutable_data()),
                     .out_dtype = DtypeOf(out),
                     .softmax_scale = options.softmax_scale};
  if (options.sinks) {
    RequireShape(*options.sinks, {heads});
    queries.sinks = options.sinks->data();
  }
  const py::gil_scoped_release release;
  cache.Attend(layer, rows, queries);
}

// An array [batch, heads, tokens, head_dim] in the memory of a device. Strides are in bytes.
struct HeadArray {
  std::byte* data = nullptr;
  DataType dtype = DataType::kFloat32;
  std::vector<py::ssize_t> shape;
  std::array<int64_t, 4> strides = {};
};

HeadRows ToRows(const Cache& cache, const HeadArray& array, int heads, py::ssize_t num_tokens) {
  if (array.shape != ShapeOf(cache, heads, num_tokens)) {
    throw InvalidArgument("An array in the device's memory does not fit the cache.");
  }
  return {array.data, array.dtype, array.strides};
}

struct DeviceAttendOptions {
  float softmax_scale = 1.f;
  uintptr_t sinks = 0;   // the address of [num_heads] floats in the device's memory, or 0
  uintptr_t stream = 0;  // as of Device::RunInOrderOf
};

using DevicePair = std::pair<HeadArray, HeadArray>;

// The output is contiguous.
void AttendOnDevice(Cache& cache, int layer, const DevicePair& q_and_out, const DevicePair& kv,
                    const DeviceAttendOptions& options) {
  const py::ssize_t num_tokens = kv.first.shape.size() == 4 ? kv.first.shape[2] : 0;
  cache.RequireRoom(layer, static_cast<int>(std::min<py::ssize_t>(num_tokens, INT32_MAX)));
  const ContiguousCacheConfig& config = cache.config();
  const NewRows rows = {ToRows(cache, kv.first, config.kv_heads, num_tokens),
                        ToRows(cache, kv.second, config.kv_heads, num_tokens),
                        static_cast<int>(num_tokens)};
  ToRows(cache, q_and_out.second, config.q_heads, num_tokens);
  const Queries queries = {.q = ToRows(cache, q_and_out.first, config.q_heads, num_tokens),
                           .out = q_and_out.second.data,
                           .out_dtype = q_and_out.second.dtype,
                           .softmax_scale = options.softmax_scale,
                           .sinks = reinterpret_cast<const float*>(options.sinks),
                           .stream = reinterpret_cast<void*>(options.stream)};
  const py::gil_scoped_release release;
  cache.Attend(layer, rows, queries);
}

int64_t BytesPerStep(Cache& cache) {
  int64_t bytes = 0;
  for (int layer = 0; layer < static_cast<int>(cache.config().layers.size()); ++layer) {
    bytes += DecodeCost(cache.NextStep(layer)).kv_bytes;
  }
  return bytes;
}

// The NumPy dtypes of stored rows.
py::dtype FloatDtype(DataType dtype) {
  return dtype == DataType::kFloat32
             ? py::dtype("float32")
             : py::dtype(dtype == DataType::kFloat16 ? "float16" : "uint16");
}

py::dtype CodeDtype(int bits, DataType dtype) {
  return bits == 16 ? FloatDtype(dtype) : py::dtype(bits == 8 ? "uint8" : "uint32");
}

// Returns the arrays [batch, heads, block_tokens, n] of a layer's side: the codes and, if the
// format has them, the metadata. They refer to the cache's memory and keep it alive.
py::tuple Stored(const py::object& self, int layer, bool is_value) {
  const auto& cache = self.cast<const Cache&>();
  cache.RequireLayer(layer);
  cache.RequireHostMemory("codes");
  if (cache.config().window > 0) {
    throw InvalidArgument("A cache with a window has no contiguous codes.");
  }
  const KvLayerView view = cache.View(layer);
  const KvSide side = is_value ? KvSide::kV : KvSide::kK;
  const int s = static_cast<int>(side);
  const auto array = [&](const py::dtype& dtype, std::byte* data, int64_t row_bytes,
                         std::vector<py::ssize_t> strides) {
    strides.push_back(dtype.itemsize());
    return py::array(dtype,
                     {py::ssize_t{cache.config().batch_size}, py::ssize_t{view.kv_heads},
                      py::ssize_t{view.block_seq_len}, row_bytes / dtype.itemsize()},
                     std::move(strides), data, self);
  };
  const auto head_stride = [&](std::byte* (KvLayerView::*find)(KvSide, int64_t, int) const) {
    return view.kv_heads > 1 ? (view.*find)(side, 0, 1) - (view.*find)(side, 0, 0) : 0;
  };
  py::array codes = array(
      CodeDtype(InfoOf(view.format[s]).bits, view.dtype), view.Payload(side, 0, 0),
      view.row_bytes[s], {view.block_bytes, head_stride(&KvLayerView::Payload), view.row_bytes[s]});
  py::object metadata = py::none();
  if (view.scale_bytes[s] > 0) {
    metadata =
        array(py::dtype("uint8"), view.Scales(side, 0, 0), view.scale_bytes[s],
              {view.scale_block_bytes, head_stride(&KvLayerView::Scales), view.ScaleStride()});
  } else if (view.param_bytes[s] > 0) {
    metadata = array(FloatDtype(view.dtype), view.Params(side, 0, 0), view.param_bytes[s],
                     {view.block_bytes, head_stride(&KvLayerView::Params), view.param_bytes[s]});
  }
  return py::make_tuple(std::move(codes), std::move(metadata));
}

ContiguousCacheConfig MakeConfig(const std::vector<std::pair<py::object, py::object>>& formats) {
  ContiguousCacheConfig config;
  for (const auto& [k, v] : formats) {
    config.layers.push_back({ToKvFormat("formats", k), ToKvFormat("formats", v)});
  }
  return config;
}

}  // namespace

void DefContiguousCache(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  using Config = ContiguousCacheConfig;
  py::class_<Config> config(m, "ContiguousCacheConfig");
  config.def(py::init(&MakeConfig), py::arg("formats"))
      .def_readwrite("num_heads", &Config::q_heads)
      .def_readwrite("num_kv_heads", &Config::kv_heads)
      .def_readwrite("head_dim", &Config::head_dim)
      .def_readwrite("max_seq_len", &Config::max_seq_len)
      .def_readwrite("batch_size", &Config::batch_size)
      .def_readwrite("window", &Config::window)
      .def_readwrite("rotate_k", &Config::rotate_k)
      .def_readwrite("search_scales", &Config::search_scales)
      .def_readwrite("exact", &Config::exact)
      .def_readwrite("paged", &Config::paged)
      .def_property_readonly("num_bytes", &Cache::PoolBytes);
  DefEnum(config, "dtype", &Config::dtype, kDataTypes);

  py::class_<AttendOptions>(m, "AttendOptions")
      .def(py::init([](float scale, std::optional<Floats> sinks) {
             return AttendOptions{scale, std::move(sinks)};
           }),
           py::arg("softmax_scale"), py::arg("sinks").noconvert() = py::none());

  py::class_<HeadArray>(m, "HeadArray")
      .def(py::init([](uintptr_t address, const std::string& dtype, std::vector<py::ssize_t> shape,
                       const std::array<int64_t, 4>& strides) {
             return HeadArray{reinterpret_cast<std::byte*>(address),
                              Parse("dtype", kDataTypes, dtype), std::move(shape), strides};
           }),
           py::arg("address"), py::arg("dtype"), py::kw_only(), py::arg("shape"),
           py::arg("strides"))
      .def_readonly("shape", &HeadArray::shape);
  py::class_<DeviceAttendOptions>(m, "DeviceAttendOptions")
      .def(py::init([](float scale, uintptr_t sinks, uintptr_t stream) {
             return DeviceAttendOptions{scale, sinks, stream};
           }),
           py::arg("softmax_scale"), py::kw_only(), py::arg("sinks") = 0, py::arg("stream") = 0);

  py::class_<Cache, std::shared_ptr<Cache>>(m, "ContiguousCache")
      .def(py::init([](std::shared_ptr<Device> device, const Config& made) {
             return std::make_shared<Cache>(std::move(device), made);
           }),
           py::arg("device"), py::arg("config"), release())
      .def_property_readonly("seq_len", &Cache::seq_len)
      .def_property_readonly("num_bytes", &Cache::num_bytes)
      .def_property_readonly("bytes_per_token", &Cache::bytes_per_token)
      .def_property_readonly("bytes_per_step", &BytesPerStep)
      .def_property_readonly("num_nonfinite", &Cache::num_nonfinite)
      .def("append", &Append, py::arg("layer"), py::arg("kv"))
      .def("update", &Update, py::arg("layer"), py::arg("kv"))
      .def("attend", &Attend, py::arg("layer"), py::arg("q_and_out"), py::arg("kv"),
           py::arg("options"))
      .def("attend_on_device", &AttendOnDevice, py::arg("layer"), py::arg("q_and_out"),
           py::arg("kv"), py::arg("options"))
      .def("read", &Read, py::arg("layer"))
      .def("stored", &Stored, py::arg("layer"), py::arg("is_value"))
      .def("advance", &Cache::Advance, py::arg("num_tokens"))
      .def("truncate", &Cache::Truncate, py::arg("seq_len"))
      .def("reset", &Cache::Reset);
}

}  // namespace turbomind
