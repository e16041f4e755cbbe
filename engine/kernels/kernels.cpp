// The compute of a CPU step, written so that a token's result never depends on its batch: the same token gives the
// same bits whether it is verified alone, with seven drafts behind it, or among thirty other requests.

#include <torch/extension.h>

#include "attention.h"
#include "decoder.h"
#include "product.h"

namespace dspark {

// Writes k, v [T, Hk, D] to their places and lets q [T, Hq, D] attend to positions up to its own: [T, Hq, D].
torch::Tensor write_and_attend(torch::Tensor q, torch::Tensor k, torch::Tensor v, torch::Tensor keys,
                               torch::Tensor values, torch::Tensor pages, torch::Tensor owner, torch::Tensor position,
                               double scale, int64_t window) {
  const int64_t Hq = q.size(1), D = q.size(2), Hk = keys.size(1);
  TORCH_CHECK(Hq % Hk == 0, Hq, " query heads cannot share ", Hk, " key heads evenly");
  q = q.contiguous();
  k = k.contiguous();
  v = v.contiguous();
  const Pool pool(keys, values);
  const Places at(pages, owner, position, position);
  auto out = torch::empty_like(q);
  const float *qp = q.data_ptr<float>(), *kp = k.data_ptr<float>(), *vp = v.data_ptr<float>();
  float* to = out.data_ptr<float>();
  for (int64_t t = 0; t < at.tokens; ++t) write_kv(kp + t * Hk * D, vp + t * Hk * D, t, pool, at);
  in_team([&](Team& team) { attention(team, qp, Hq * D, Hq, pool, at, static_cast<float>(scale), window, to); });
  return out;
}

}  // namespace dspark

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace dspark;
  const auto free = py::call_guard<py::gil_scoped_release>();
  m.def("pack", &pack);
  m.def("linear", &linear, free);
  m.def("write_and_attend", &write_and_attend, free);
  py::class_<Decoder>(m, "Decoder")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, double, double>())
      .def("add_layer", &Decoder::add_layer)
      .def("run", &Decoder::run, free)
      .def("write_context", &Decoder::write_context, free);
}
