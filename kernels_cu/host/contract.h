// What this library assumes of the Python side, one fact per line. Python compares it with its own
// list and reports differences before the first kernel runs.
#pragma once

#include <string>
#include <vector>

#include "attention/attention_backward_args.h"
#include "attention/attention_bias_args.h"
#include "attention/attention_window_args.h"
#include "attention/gather_rows_args.h"
#include "conv/pixels_args.h"
#include "conv/stem_args.h"
#include "host/conv_call.h"
#include "host/pointwise.h"
#include "linear/linear_combs_args.h"
#include "linear/linear_unaligned_args.h"

namespace fx_fuser {
namespace {

std::vector<std::string> contract() {
  std::string leaves = "leaves";
  for (const NormLeaf& leaf : kNormLeaves) leaves += std::string(" ") + leaf.name;
  std::string tiles = "tiles";
  for (const UnalignedShape& shape : kUnalignedShapes) {
    tiles += " " + std::to_string(shape.tile_m()) + "x" + std::to_string(shape.tile_n());
  }
  std::string combs = "combs";
  for (const CombShape& shape : kCombShapes) {
    combs += " " + std::to_string(shape.tile_m()) + "x" + std::to_string(shape.tile_n);
    combs += shape.takes(true) ? shape.takes(false) ? ":both" : ":k" : ":lines";
  }
  std::string attention = "attention";
  for (const AttentionShape& shape : kAttentionShapes) {
    attention += " " + std::to_string(shape.d) + ":" + std::to_string(shape.rows()) + "x" +
                 std::to_string(shape.keys);
  }
  std::string dropout =
      "dropout " + std::to_string(kMostDropped) + "/" + std::to_string(kDropoutSteps);
  std::string backward = "backward";
  for (const AttentionBackwardShape& shape : kAttentionBackwardShapes) {
    backward += " " + std::to_string(shape.tiles.d) + ":" + std::to_string(shape.tiles.rows()) +
                "x" + std::to_string(shape.tiles.keys);
  }
  std::string biases = "biases";
  for (const BiasShape& shape : kBiasShapes) {
    biases += " " + std::to_string(shape.forward.d) + ":" + std::to_string(kBiasRows) + "x" +
              std::to_string(shape.forward.columns);
  }
  std::string windows = "windows";
  for (const WindowShape& shape : kWindowShapes) {
    windows += " " + std::to_string(shape.d) + ":" + std::to_string(kWindowRows);
  }
  std::string pixels = "pixels";
  for (int i = 0; i < kPixelsShapeCount; ++i) {
    const PixelsShape& shape = kPixelsShapes[i];
    pixels += " " + std::to_string(shape.pixels) + "x" + std::to_string(shape.tile_channels());
  }
  return {"limit tensors " + std::to_string(kMaxInputs),
          "limit numbers " + std::to_string(kMaxScalars),
          "limit shared " + std::to_string(kStemShared),
          leaves + " " + kNormNumber,
          tiles,
          combs,
          attention,
          dropout,
          backward,
          biases,
          windows,
          "gathers " + std::to_string(kGatherPlaces) + ":" + std::to_string(kGatherColumns),
          pixels};
}

}  // namespace
}  // namespace fx_fuser
