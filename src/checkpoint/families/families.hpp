#pragma once

#include "checkpoint/families/family.hpp"

namespace switchyard {

extern const Family kMixtral;
extern const Family kPhimoe;
extern const Family kMinimax;
extern const Family kMinimaxM2;
extern const Family kQwen2Moe;
extern const Family kQwen3Moe;
extern const Family kQwen3Next;
extern const Family kQwen35Moe;
extern const Family kQwen3VlMoe;
extern const Family kOlmoe;
extern const Family kFlexOlmo;
extern const Family kDeepseekV2;
extern const Family kDeepseekV3;
extern const Family kDots1;
extern const Family kGlm4MoeLite;
extern const Family kSolarOpen;
extern const Family kMimoV2Flash;
extern const Family kErnie45Moe;
extern const Family kHunyuanV1Moe;
extern const Family kLfm2Moe;
extern const Family kAfmoe;
extern const Family kGptOss;
extern const Family kGraniteMoe;
extern const Family kGraniteMoeShared;
extern const Family kJetmoe;
extern const Family kDbrx;
extern const Family kLlama4;
extern const Family kLongcatFlash;

}  // namespace switchyard
