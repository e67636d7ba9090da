{{/* Name of the chart's objects. */}}
{{- define "kubelora.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Labels that select the operator's pods; they never change. */}}
{{- define "kubelora.selector" -}}
app.kubernetes.io/name: kubelora-operator
app.kubernetes.io/instance: {{ .Release.Name | trunc 63 }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "kubelora.labels" -}}
{{ include "kubelora.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kubelora
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* A complete image reference from (dict "image" VALUES "default" TAG). */}}
{{- define "kubelora.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .default .image.tag }}
{{- end -}}
{{- end }}

{{- define "kubelora.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "kubelora.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{/* What the operator does in every namespace with jobs: WORK in kubelora_operator/kube/rbac.py. */}}
{{- define "kubelora.workRules" -}}
- apiGroups: [kubelora.dev]
  resources: [loratrainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [kubelora.dev]
  resources: [loratrainingjobs/status]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, create]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch, list]
{{- end }}
