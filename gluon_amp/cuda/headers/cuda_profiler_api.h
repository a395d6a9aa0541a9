// src/operator/contrib/transformer.cu includes this header and uses nothing of it.
#pragma once
